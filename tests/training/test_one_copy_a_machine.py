"""The experts of a batch: every rank reads them, and the ranks of a machine hold them once."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vapo_megatron.training import broadcast

SHAPE = (1001, 6)


def sent() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int16).view(SHAPE)


def receive(machines: str, can_share: bool) -> Any:
    """What a rank gets, and what it reads after the first rank of each machine has written its own rank into it."""
    rank = dist.get_rank()
    socket.gethostname = lambda: machines[rank]  # type: ignore[assignment]
    if not can_share:
        broadcast.share_memory = lambda group: False  # type: ignore[assignment]
    broadcast._SLICE_BYTES = 1000
    found = []
    for _ in range(2):  # a later batch has memory of its own
        held = broadcast._broadcast_once_a_machine(sent() if rank == 0 else None, torch.Size(SHAPE), torch.int16)
        found.append((held, held.tolist()))
    dist.barrier()
    if machines.index(machines[rank]) == rank:
        found[0][0][0, 0] = 100 + rank
    dist.barrier()
    return [content for _, content in found], int(found[0][0][0, 0]), int(found[1][0][0, 0])


@pytest.mark.parametrize(
    ("machines", "can_share", "written"),
    [
        ("aabb", True, [100, 100, 102, 102]),
        ("abb", True, [100, 101, 101]),
        ("aab", False, [100, 0, 102]),
        ("a", True, [100]),
    ],
)
def test_every_rank_gets_it_and_a_machine_holds_it_once(machines: str, can_share: bool, written: list[int]) -> None:
    found = run_ranks(len(machines), receive, machines, can_share)
    assert all(content == [sent().tolist()] * 2 for content, _, _ in found)
    assert [first for _, first, _ in found] == written
    assert all(second == 0 for _, _, second in found)
