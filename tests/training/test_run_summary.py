"""The last lines of a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.outputs import show_end


@pytest.mark.parametrize(("values", "shown"), [([0.25, None, 0.5625], "0.250 -> 0.562"), ([None, 0.5625], "0.562")])
def test_an_evaluation_is_shown_with_where_it_began_if_that_was_measured(
    tmp_path: Path, values: list[float | None], shown: str
) -> None:
    name, closed = "evaluation/sums_avg@2", dict[str, object]()
    rows = [{"step": step} | ({} if value is None else {name: value}) for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = SimpleNamespace(closing=lambda _, content: closed.update(content))
    show_end("run", cast(Recorder, SimpleNamespace(run_dir=tmp_path, is_main_rank=True, console=console)))
    assert closed[name] == shown
