"""The report shows what metrics.jsonl holds, from the first step on, and stands alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.facts import environment_facts, write_environment
from vapo_megatron.operations.report.curves import draw_curves
from vapo_megatron.operations.report.report import TableRow, summarise, write_report


def row(step: int, **metrics: float | None) -> dict[str, Any]:
    return {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}


def run_dir(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return folder


def titles(rows: list[dict[str, Any]]) -> list[str]:
    return [axes.get_title(loc="left") for axes in draw_curves(rows).axes]


def test_report_stands_alone_and_escapes_what_it_quotes(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1, accuracy__mean=0.5), row(2, accuracy__mean=0.75)])
    (folder / "config.yaml").write_text("name: <script>alert(1)</script>\n")
    (folder / "evaluation.json").write_text('{"after": {"accuracy": 0.9581}}')
    write_environment(folder)
    path = write_report(folder)
    page = path.read_text(encoding="utf-8")
    assert path == folder / "report.html"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64,iVBOR" in page and "http" not in page
    assert "&lt;script&gt;" in page and "<script>" not in page
    assert "after.accuracy" in page and "0.9581" in page and "packages.torch" in page
    assert "0.75 (step 2)" in page


def test_table_gives_first_best_and_last() -> None:
    rows = [row(step, critic__value_loss=loss) for step, loss in ((1, 0.5), (2, 0.1), (3, None), (4, 0.2))]
    assert summarise(rows) == [TableRow("critic/value_loss", "0.5 (step 1)", "0.1 (step 2)", "0.2 (step 4)")]


def test_only_panels_with_figures_are_drawn() -> None:
    assert titles([row(1, actor__entropy=0.5)]) == ["Policy entropy (nats per token)"]
    assert titles([row(1, unknown=0.5)]) == []


def test_pretraining_is_drawn_against_its_own_counter() -> None:
    metrics = {"value_pretraining/value_loss": 0.3, "value_pretraining/explained_variance": 0.2}
    rows: list[dict[str, Any]] = [{"step": 0, "value_pretraining/iteration": step} | metrics for step in (1, 2, 3)]
    (axes,) = draw_curves(rows).axes
    assert list(axes.get_lines()[0].get_xdata()) == [1, 2, 3]


def test_phases_that_run_now_and_then_stay_out_of_the_picture() -> None:
    rows = [row(step, time__step=5.0, time__rollout=3.0, time__critic_update=2.0) for step in range(1, 9)]
    rows[3]["time/evaluation"] = 100.0
    (axes,) = draw_curves(rows).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rollout", "critic update"]


def test_a_run_of_one_step_and_of_nothing_finite_can_be_reported(tmp_path: Path) -> None:
    rows = [row(1, accuracy__mean=None, actor__grad_norm=0.0, time__step=0.0, time__rollout=0.0)]
    assert write_report(run_dir(tmp_path, rows)).exists()


@pytest.mark.parametrize("rows", [[], None])
def test_without_a_step_there_is_no_report(tmp_path: Path, rows: list[dict[str, Any]] | None) -> None:
    folder = tmp_path / "absent" if rows is None else run_dir(tmp_path, rows)
    with pytest.raises(BadInput, match="no such run directory" if rows is None else "no step in it"):
        write_report(folder)


def test_environment_names_what_is_there_and_what_is_not() -> None:
    facts = environment_facts()
    assert facts["packages"]["torch"].startswith("2.")
    assert "apex" in facts["packages"]
    assert facts["python"].startswith("3.")
