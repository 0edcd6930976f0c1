"""The last lines of a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.outputs import show_end


@pytest.mark.parametrize(
    ("values", "shown"), [([0.25, None, 0.5625], "0.250 -> 0.562"), ([None, 0.5625], "0.562")]
)
def test_evaluation_is_shown_with_its_start_if_measured(
    tmp_path: Path, values: list[float | None], shown: str
) -> None:
    name = "evaluation/sums_avg@2"
    closed = dict[str, object]()
    rows = [
        {"step": step} | ({} if value is None else {name: value})
        for step, value in enumerate(values)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = SimpleNamespace(closing=lambda _, content: closed.update(content))
    show_end(
        "run", cast(Recorder, SimpleNamespace(run_dir=tmp_path, is_main_rank=True, console=console))
    )
    assert closed[name] == shown


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([("throughput/gpu_hours", 12.25), ("throughput/hours", 2.0)], ("GPU-hours", "24.50")),
        ([("throughput/hours", 0.25)], ("hours", "0.50")),
    ],
)
def test_the_cost_of_a_run_is_in_its_last_lines(
    tmp_path: Path, rows: list[tuple[str, float]], shown: tuple[str, str]
) -> None:
    closed = dict[str, object]()
    written = [{"step": step, "rollout/tokens": 750, **dict(rows)} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    console = SimpleNamespace(closing=lambda _, content: closed.update(content))
    show_end(
        "run", cast(Recorder, SimpleNamespace(run_dir=tmp_path, is_main_rank=True, console=console))
    )
    assert (closed[shown[0]], closed["response tokens"]) == (shown[1], "1,500")
    assert len([name for name in closed if "hours" in name]) == 1
