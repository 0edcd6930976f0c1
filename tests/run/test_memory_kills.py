"""A rank that the system killed for memory is told of as such; others are not."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from vapo_megatron.errors import TryAgain
from vapo_megatron.run import failures, ranks
from vapo_megatron.run.failures import MemoryKills


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel counts, in a file that a test may write."""
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 0\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(failures, "_events_files", lambda groups: [path])
    return path


def die(events: Path, for_memory: bool) -> None:
    if dist.get_rank() == 1:
        if for_memory:
            events.write_text("low 0\noom 3\noom_kill 3\n")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    signal.pause()


@pytest.mark.parametrize("for_memory", [True, False])
def test_a_rank_that_was_killed_says_why(events: Path, for_memory: bool) -> None:
    with pytest.raises(TryAgain) as end:
        ranks.start_ranks(2, partial(die, events, for_memory), 60)
    message = str(end.value)
    assert message.startswith("rank1 was killed by SIGKILL") and "\n" not in message
    assert ("want of memory" in message) == for_memory


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    lines = Path("/proc/self/cgroup").read_text()
    controllers = [line.split(":")[1] for line in lines.splitlines()]
    name = "memory/memory.oom_control" if "memory" in controllers else "memory.events"
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    kills = MemoryKills(tmp_path)
    assert not kills.happened
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 8\n")
    assert kills.happened
