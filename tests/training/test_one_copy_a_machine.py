"""The batch: every rank reads it, the ranks of a machine hold it once, and who writes writes into a copy of its own."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from ranks import run_ranks

from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.training import broadcast


def files_of(tensor: torch.Tensor) -> str:
    """The file that this process has mapped where a tensor lies, and how ('p' is private); '' for plain memory."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _, _, inode, *name = line.split()
        low, high = (int(end, 16) for end in place.split("-"))
        if low <= address < high:
            return f"{mode} {inode} {' '.join(name)}" if "vapo-batch" in line else ""
    return ""


def receive(machines: str, can_share: bool) -> Any:
    """What a rank gets and where it lies, then what it reads of a batch and of a later one after every rank has
    written its own number into the first."""
    rank = dist.get_rank()
    socket.gethostname = lambda: machines[rank]  # type: ignore[assignment]
    if not can_share:
        broadcast.share_memory = lambda group: False  # type: ignore[assignment]
    broadcast._SLICE_BYTES = 100
    held = []
    for _ in range(2):
        batch = broadcast.broadcast_batch(make_batch() if rank == 0 else None)
        batch.values = torch.full((batch.response_tokens,), 7.0)
        broadcast.share_fields(batch, "values", "ref_logprobs")
        held.append(batch)
    content = [{name: tensor.tolist() for name, tensor in batch.tensors().items()} for batch in held]
    places = [files_of(tensor) for tensor in held[0].tensors().values()]
    dist.barrier()
    for tensor in held[0].tensors().values():
        tensor.view(-1)[0] = rank % 2
    dist.barrier()
    written = [float(tensor.view(-1)[0]) for tensor in held[0].tensors().values()]
    return content, places, written, [tensor.tolist() for tensor in held[1].tensors().values()]


@pytest.mark.parametrize(
    ("machines", "can_share", "files"), [("aabb", True, 2), ("abb", True, 1), ("aab", False, 0), ("a", True, 0)]
)
def test_every_rank_gets_it_a_machine_holds_it_once_and_writes_are_ones_own(
    machines: str, can_share: bool, files: int
) -> None:
    sent: ExperienceBatch = make_batch()
    sent.values = torch.full((sent.response_tokens,), 7.0)
    expected = {name: tensor.tolist() for name, tensor in sent.tensors().items()}
    found = run_ranks(len(machines), receive, machines, can_share)
    by_machine: dict[str, set[str]] = {}
    for rank, (content, places, written, later) in enumerate(found):
        assert content == [expected] * 2
        assert set(written) == {float(rank % 2)}, "another rank's write is seen"
        assert later == list(expected.values()), "a later batch has memory of its own"
        assert len({bool(place) for place in places}) == 1, "all of it is shared, or nothing"
        by_machine.setdefault(machines[rank], set()).update(filter(None, places))
    mapped = [places for places in by_machine.values() if places]
    assert len(mapped) == files
    # Two files a machine: what was sent, and what was filled in since; each rank has mapped the same, privately.
    assert all(len(places) == 2 and all(place.startswith("rw-p") for place in places) for places in mapped)
    alike = {machine: machines.count(machine) for machine in by_machine}
    for rank, (_, places, _, _) in enumerate(found):
        shares = can_share and alike[machines[rank]] > 1
        assert {place for place in places if place} == (by_machine[machines[rank]] if shares else set())
