"""Which steps and ranks are traced, and what a trace leaves behind."""

import json
from collections.abc import Callable
from gzip import decompress
from pathlib import Path

import pytest
import torch

from vapo_megatron.config.run import ProfileConfig
from vapo_megatron.training.state import profiled


def trace(folder: Path, step: int = 3, **keys: tuple[int, ...]) -> list[str]:
    with profiled(step, ProfileConfig(**{"steps": (3,), **keys}), folder):
        torch.ones(2, 2) @ torch.ones(2, 2)
    return sorted(path.name for path in (folder / "profile").glob("*"))


def test_only_the_named_ranks_are_traced_in_the_named_steps(tmp_path: Path) -> None:
    assert trace(tmp_path, step=2) == []
    assert trace(tmp_path, ranks=(1, 2)) == [], "this is rank 0"
    assert trace(tmp_path, ranks=(1, 0)) == ["step_00003_rank0.json.gz"]
    events = json.loads(
        decompress((tmp_path / "profile" / "step_00003_rank0.json.gz").read_bytes())
    )["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_gpu_allocation_history_is_written_for_traced_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Callable[[int], None]
) -> None:
    """CUDA's recorder, stood in for by one that writes whether it was on."""
    recording: list[bool] = []
    gpus(1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", max_entries=None: recording.append(enabled is not None),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(str(recording))
    )
    assert trace(tmp_path, step=2) == [] and recording == []
    assert trace(tmp_path) == ["step_00003_rank0.json.gz", "step_00003_rank0.memory.pickle"]
    assert (tmp_path / "profile" / "step_00003_rank0.memory.pickle").read_text() == "[True]"
    assert recording == [True, False]
