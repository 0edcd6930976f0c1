"""Pictures in a terminal say what their figures say."""

import io

import pytest
from rich.console import Console

from vapo_megatron.monitoring.pictures import (
    Bars,
    Intervals,
    Picture,
    Scatter,
    histogram,
    means_by_rank,
    show_picture,
)


def drawn(picture: Picture, width: int = 80) -> list[str]:
    file = io.StringIO()
    show_picture(picture, Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_bars_are_as_long_as_their_parts_and_reach_the_limit() -> None:
    rows = [("a", [("kv", 40.0), ("weights", 20.0)]), ("bb", [("weights", 80.0)])]
    title, first, second, legend, _ = drawn(Bars("memory", "GiB", rows, 80.0))
    assert title == "memory" and legend.startswith("█ weights  ▓ kv") and "GiB" in legend
    assert second.count("█") == pytest.approx(2 * first.count("▓"), abs=3)
    assert first.count("█") + first.count("▓") == pytest.approx(0.75 * second.count("█"), abs=2)
    assert "│" in first and first.endswith(" 60.0") and second.endswith(" 80.0")


def test_many_parts_share_the_marks_that_there_are() -> None:
    parts = [(f"part {number}", float(100 - number)) for number in range(12)]
    lines = drawn(Bars("memory", "GiB", [("a", parts)]), 120)
    assert "o other" in " ".join(lines) and "part 6" in " ".join(lines)
    assert "part 8" not in " ".join(lines)
    assert lines[1].endswith(f" {sum(size for _, size in parts):,.1f}")


def test_intervals_stand_where_their_numbers_are() -> None:
    rows = [("low", 0.0, 0.25, 0.5), ("high", 0.5, 0.75, 1.0)]
    _, low, high, axis, *_ = drawn(Intervals("shares", rows, 0.0, 1.0, 0.5))
    assert low.index("├") < low.index("●") < low.index("┤") == pytest.approx(high.index("├"), abs=1)
    assert "0.250 [0.000, 0.500]" in low and axis.split() == ["0", "0.5", "1"]
    assert low.index("├") - 5 == axis.index("0") - 5 and high.index("┤") <= axis.rindex("1")


def test_a_histogram_counts_edges_upwards_and_ends_inside() -> None:
    third = 1 / 3
    values = [-1.0, -third, 0.0, third, 1.0, 1.0]
    picture = histogram("changes", "problems", values, -1.0, 1.0, 6, 0.0)
    assert list(picture.counts) == [1, 0, 1, 1, 1, 2]
    lines = drawn(picture)
    lengths = [line.count("█") for line in lines[1:7]]
    assert lengths[5] == max(lengths) == pytest.approx(2 * lengths[0], abs=1) and lengths[1] == 0


def test_means_of_ranks_are_on_the_diagonal_of_a_right_critic() -> None:
    points = [(number / 100, number / 100) for number in range(100)]
    means = means_by_rank(points, 10)
    assert len(means) == 10 and all(x == pytest.approx(y) for x, y in means)
    assert means[0][0] == pytest.approx(0.045) and means_by_rank([], 10) == []
    lines = drawn(Scatter("critic", "value", "returns", points, means))
    rows = [line[10:] for line in lines[1:13]]
    places = [row.index("●") for row in rows if "●" in row]
    assert len(places) >= 8 and places == sorted(places, reverse=True)


@pytest.mark.parametrize("width", [30, 200])
def test_a_terminal_of_any_width_is_enough(width: int) -> None:
    rows = [("a long name of a phase", [("kv", 40.0)])]
    file = io.StringIO()
    show_picture(Bars("memory", "GiB", rows, 80.0), Console(file=file, width=width))
    assert "40.0" in file.getvalue()


def test_nothing_to_draw_is_no_error() -> None:
    assert drawn(Bars("seconds", "s", []))[0] == "seconds"
    assert drawn(Intervals("shares", [], 0.0, 1.0))[0] == "shares"
    assert drawn(Scatter("critic", "value", "returns", []))[0] == "critic"
