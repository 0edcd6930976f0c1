"""Ranks start where they are told to, and the first that fails ends all of them with its own words."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import ranks  # noqa: F401  (imports what ranks need before they are forked)
import torch.distributed as dist

from vapo_megatron.cluster.ranks import place_from_environment, start_ranks
from vapo_megatron.errors import BadInput, RunFailed


def write_rank(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(f"{os.getpid()} {dist.get_world_size()}")


def fail_on_one(folder: Path) -> None:
    write_rank(folder)
    if dist.get_rank() == 1:
        raise BadInput("data.train: there is no such file")
    time.sleep(60)


def killed_on_one(folder: Path) -> None:
    write_rank(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_every_rank_runs_once_in_one_world(tmp_path: Path) -> None:
    start_ranks(3, partial(write_rank, tmp_path), 1)
    found = {int(path.name): path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(found) == [0, 1, 2]
    assert {size for _, size in found.values()} == {"3"}
    assert len({pid for pid, _ in found.values()}) == 3


@pytest.mark.parametrize(
    "body,error,message",
    [
        (fail_on_one, BadInput, r"^data\.train: there is no such file$"),
        (killed_on_one, RunFailed, r"rank1 ended with signal 9 and said nothing; out of memory is the usual reason"),
    ],
)
def test_the_first_failure_ends_all_ranks(tmp_path: Path, body: object, error: type[Exception], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        start_ranks(3, partial(body, tmp_path), 1)  # type: ignore[operator]
    assert time.monotonic() - started < 45, "the others were waited for"
    for path in tmp_path.iterdir():
        assert not psutil.pid_exists(int(path.read_text().split()[0]))


def test_a_world_that_somebody_else_started_is_joined() -> None:
    assert place_from_environment({}) is None
    assert place_from_environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    torchrun = place_from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert torchrun is not None
    assert (torchrun.rank, torchrun.world_size, torchrun.local_rank, torchrun.init_method) == (3, 8, 1, "env://")
    slurm = {"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    with pytest.raises(BadInput, match="MASTER_ADDR and MASTER_PORT are not set"):
        place_from_environment(slurm)
    place = place_from_environment(slurm | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.init_method) == (9, 16, 1, "tcp://node1:29500")
