"""Moving what rank 0 knows to every rank."""

import functools
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import VapoError
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.mesh import world_timeout
from vapo_megatron.weights.bucket import FreshSharedSlots, share_memory

T = TypeVar("T")

# Of one message: what a backend sets aside for a message stays small beside the batch.
_SLICE_BYTES = 256 << 20
# Of a batch, what is by far the largest; nobody writes into it.
_ONCE_A_MACHINE = {"routed_experts"}


def broadcast_batch(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch (others pass None) on every rank, with every field that is there.

    From host memory to host memory, over the CPU's backend: the GPUs belong to the engines at that time. A machine has
    one copy of routed_experts, which is not to be written into.
    """
    shapes: list[Any] = [None]
    if batch is not None:
        shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in batch.tensors().items()]]
    dist.broadcast_object_list(shapes, src=0)
    received: dict[str, Any] = {} if batch is None else batch.tensors()
    for name, shape, dtype in shapes[0]:
        if name in _ONCE_A_MACHINE:
            received[name] = _broadcast_once_a_machine(received.get(name), shape, dtype)
            continue
        if batch is None:
            received[name] = torch.empty(shape, dtype=dtype)
        _broadcast_bytes(received[name])
    return ExperienceBatch(**received)


def _broadcast_bytes(tensor: Tensor, group: Any = None) -> None:
    """Collective: rank 0's content of a contiguous CPU tensor, in place. Bytes, as backends lack some dtypes."""
    for part in tensor.view(-1).view(torch.uint8).split(_SLICE_BYTES):
        dist.broadcast(part, src=0, group=group)


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


def _broadcast_once_a_machine(tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Collective: a contiguous CPU tensor of rank 0's, in memory that the ranks of a machine share if they can."""
    machine = _machine()
    if machine.sharers is not None:
        memory = FreshSharedSlots(machine.sharers).take(0, math.prod(shape) * dtype.itemsize)
        held = memory.buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        if tensor is not None:
            held.copy_(tensor)
    else:
        held = torch.empty(shape, dtype=dtype) if tensor is None else tensor
    if machine.receivers is not None:
        _broadcast_bytes(held, machine.receivers)
    if machine.sharers is not None:
        dist.barrier(machine.sharers)
    return held


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
