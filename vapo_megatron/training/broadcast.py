"""Moving what rank 0 knows to every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import VapoError
from vapo_megatron.experience.batch import ExperienceBatch

T = TypeVar("T")

# Of one message: what a backend sets aside for a message stays small beside the batch.
_SLICE_BYTES = 256 << 20


def broadcast_batch(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch (others pass None) on every rank, token_fields aside.

    From host memory to host memory, over the CPU's backend: the GPUs belong to the engines at that time.
    """
    shapes: list[Any] = [None]
    if batch is not None:
        shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in batch.tensors().items()]]
    dist.broadcast_object_list(shapes, src=0)
    received: dict[str, Any] = {} if batch is None else batch.tensors()
    for name, shape, dtype in shapes[0]:
        if batch is None:
            received[name] = torch.empty(shape, dtype=dtype)
        _broadcast_bytes(received[name])
    return ExperienceBatch(**received)


def _broadcast_bytes(tensor: Tensor) -> None:
    """Collective: rank 0's content of a contiguous CPU tensor, in place. Bytes, as backends lack some dtypes."""
    for part in tensor.view(-1).view(torch.uint8).split(_SLICE_BYTES):
        dist.broadcast(part, src=0)


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
