"""Moving what rank 0 knows to every rank."""

import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import VapoError
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.mesh import world_timeout
from vapo_megatron.weights.bucket import Place, lay_out, share_memory, view

T = TypeVar("T")

# Of one message: what a backend sets aside for a message stays small beside the batch.
_SLICE_BYTES = 256 << 20


def broadcast_batch(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch (others pass None) on every rank, with every field that is there.

    It is sent once to each machine, along a tree of machines, and lies there once: the ranks of a machine map the same
    memory. Who writes into a tensor of it writes into a copy of its own (of the pages it touches, made by the kernel).
    From host memory to host memory, over the CPU's backend: the GPUs belong to the engines at that time.
    """
    if dist.get_world_size() == 1:
        assert batch is not None, "rank 0 has the batch"
        return batch
    layout: list[Any] = [None]
    if batch is not None:
        layout = [_lay_out(batch.tensors())]
    dist.broadcast_object_list(layout, src=0)
    places, size = layout[0]
    machine = _machine()

    def fill(memory: Tensor) -> None:
        if batch is not None:
            _copy(batch.tensors(), memory, places)
        for part in memory.split(_SLICE_BYTES):
            dist.broadcast(part, src=0, group=machine.receivers)

    held = _once_a_machine(machine, size, fill)
    return ExperienceBatch(**{place.name: view(held, place) for place in places})


def share_fields(batch: ExperienceBatch, *names: str) -> None:
    """Collective: fields that every rank has filled in alike, once a machine from now on; None stays None."""
    machine = _machine()
    found = {name: tensor for name in names if (tensor := getattr(batch, name)) is not None}
    if machine.sharers is None or not found:
        return
    places, size = _lay_out(found)
    held = _once_a_machine(machine, size, lambda memory: _copy(found, memory, places))
    for place in places:
        setattr(batch, place.name, view(held, place))


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[list[Place], int]:
    return lay_out((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _copy(tensors: Mapping[str, Tensor], memory: Tensor, places: Sequence[Place]) -> None:
    for place in places:
        view(memory, place).copy_(tensors[place.name])


def _once_a_machine(machine: "_Machine", size: int, fill: Callable[[Tensor], None]) -> Tensor:
    """Collective: uint8 [size], filled by one rank of each machine, as memory that all of the machine's ranks map.

    Ranks that cannot share memory each fill their own. A mapping is private: what is written into it, if anything is,
    no other rank sees.
    """
    if machine.sharers is None:
        own = torch.empty(size, dtype=torch.uint8)
        fill(own)
        return own
    fd, path = -1, [""]
    if machine.receivers is not None:
        fd = os.memfd_create("vapo-batch")
        os.ftruncate(fd, size)
        path = [f"/proc/{os.getpid()}/fd/{fd}"]
        fill(torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8))
    dist.broadcast_object_list(path, group=machine.sharers, group_src=0)
    held = torch.from_file(path[0], shared=False, size=size, dtype=torch.uint8)
    dist.barrier(machine.sharers)  # all have mapped it: the file may be closed
    if fd >= 0:
        os.close(fd)
    return held


@dataclass(frozen=True)
class _Machine:
    """How this rank comes to what a machine holds once.

    sharers: the group of the ranks that hold it together with this one; None where they cannot share memory.
    receivers: the group of the ranks, rank 0 the first, that receive it for their sharers; None on the others.
    """

    sharers: Any
    receivers: Any


@functools.cache
def _machine() -> _Machine:
    """Collective the first time."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    together = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    groups = {name: _group(ranks) for name, ranks in together.items()}
    own = groups[names[dist.get_rank()]]
    shares = own.size() > 1 and share_memory(own)
    receives = [False] * len(names)
    dist.all_gather_object(receives, not shares or own.rank() == 0)
    receivers = _group([rank for rank, does in enumerate(receives) if does])
    return _Machine(own if shares else None, receivers if receives[dist.get_rank()] else None)


def _group(ranks: list[int]) -> Any:
    return dist.new_group(ranks, timeout=world_timeout(), backend="gloo")


def on_rank_zero(function: Callable[[], T]) -> T:
    """Collective: what rank 0's call returns, on every rank; so does the error that it ends with.

    Raises:
        VapoError: rank 0's, marked as shared.
    """
    answer: Any = None
    if dist.get_rank() == 0:
        try:
            answer = (function(), None)
        except VapoError as error:
            answer = (None, (type(error), str(error)))
    result, failure = broadcast_value(answer)
    if failure is not None:
        kind, message = failure
        raise kind(message, shared=True)
    found: T = result
    return found


def broadcast_value(value: Any) -> Any:
    """Collective: rank 0's picklable value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
