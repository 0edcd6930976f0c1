"""The pages of figures are made of the kept parts, and what became slower is named."""

from typing import Any

import numpy as np
import pytest

from benchmarks import common, run


def part(*figures: tuple[str, float, float, float]) -> dict[str, Any]:
    return {
        "figures": [
            dict(zip(("name", "ratio", "low", "high"), figure, strict=True)) for figure in figures
        ]
    }


def test_the_pages_are_made_of_the_kept_parts() -> None:
    kept = run.read(run.KEPT)
    assert kept
    advice = "make bench KEEP=1, or python -m benchmarks.run --page"
    assert run.RESULTS.read_text() == run.results_page(kept), advice
    assert run.SUMMARY.read_text() == run.summary_page(kept), advice
    assert "not measured" not in run.summary_page(kept), "a figure of the summary was renamed"


def test_the_chart_shows_figures_that_are_kept() -> None:
    kept = run.read(run.KEPT)
    for part, name, _ in run.CHARTED:
        assert name in run.figures(kept[part]), (part, name)


def test_every_part_is_a_benchmark_that_takes_its_options() -> None:
    for name, part_of in run.PARTS.items():
        source = (run.ROOT / "benchmarks" / f"{name}.py").read_text()
        for option in part_of.options:
            assert not option.startswith("--") or f'"{option}"' in source, (name, option)


@pytest.mark.parametrize(
    ("now", "is_slower"),
    [
        ((1.9, 1.8, 2.1), False),  # within the spread
        ((1.6, 1.5, 1.79), True),  # the quartiles are apart
        ((1.6, 1.5, 1.81), False),  # they touch
        ((3.0, 2.9, 3.1), False),
    ],
)
def test_slower_is_what_is_below_with_its_quartiles_apart(
    now: tuple[float, float, float], is_slower: bool
) -> None:
    kept = part(("ours", 2.0, 1.8, 2.2))
    assert bool(list(run.slower(kept, part(("ours", *now), ("new", 0.1, 0.1, 0.1))))) is is_slower


def test_a_figure_that_is_gone_is_told() -> None:
    assert list(run.slower(part(("ours", 2.0, 1.8, 2.2)), part())) == [
        "ours: no longer measured, was 2"
    ]


def test_a_ratio_compares_rounds_and_growth_is_an_exponent() -> None:
    # The second round was disturbed on both sides alike.
    figure = common.ratio_figure("ours", [2.0, 20.0, 2.0, 2.2, 1.8], [1.0, 10.0, 1.0, 1.0, 1.0])
    assert (figure.ratio, figure.low, figure.high) == pytest.approx((2.0, 2.0, 2.0))
    sizes = np.array([1, 2, 4, 8])
    assert common.growth(sizes, 3 * sizes) == pytest.approx(1)
    assert common.growth(sizes, 0.1 * sizes**2) == pytest.approx(2)
