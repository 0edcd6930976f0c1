"""What a safe point keeps of the run, written only where a save follows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from vapo_megatron.checkpoint.manifest import GROUPS_FILE
from vapo_megatron.checkpoint.state_saver import Snapshot
from vapo_megatron.config.run import CheckpointConfig, RunConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.training import state as state_module
from vapo_megatron.training.return_history import TRACKER_FILE
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState

PROMPT = Prompt("1", "", "", (5, 7))


def group_of(tokens: int) -> list[Sample]:
    ids = np.arange(tokens, dtype=np.int32)
    logprobs = np.zeros(tokens, dtype=np.float32)
    return [Sample(PROMPT, 4, 0, 0, ids, logprobs, "stop", 0, 0)]


def test_groups_and_returns_are_packed_by_a_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Snapshot] = []
    checkpointer: Any = SimpleNamespace(safe_point=lambda snapshot, **_: given.append(snapshot))
    waiting = {4: group_of(3)}
    rollouts: Any = SimpleNamespace(
        prompts=None,
        probe=None,
        engine_weights=SimpleNamespace(version=2),
        engines=SimpleNamespace(failure=None, kv_cache_offloaded=None),
        state=lambda: ({}, dict(waiting)),
    )
    run = RunState(
        RunConfig(name="run", steps=9), CheckpointConfig(), tmp_path, checkpointer, SkippedUpdates()
    )
    run.step = 1
    run.returns.tracked = {"8": [1.0, 2.0]}
    packs = Mock(side_effect=pack_groups)
    monkeypatch.setattr(state_module, "pack_groups", packs)
    run.safe_point(rollouts)
    assert not packs.called, "no save is due"
    waiting[5] = group_of(2)
    run.returns.tracked |= {"8": [3.0, 4.0], "9": [1.0, 1.0]}
    contents = {name: content for name, content in given[0].contents.items() if callable(content)}
    packed = contents[GROUPS_FILE]()
    assert unpack_groups(packed, lambda _: PROMPT, str).keys() == {4}, "those of the safe point"
    assert contents[TRACKER_FILE]() == b'{"8": [1.0, 2.0]}'
