"""Moving what rank 0 knows to every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vapo_megatron.errors import VapoError
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.platform import current_platform

T = TypeVar("T")


def broadcast_batch(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch (others pass None) on every rank, token_fields aside."""
    shapes: list[Any] = [None]
    if batch is not None:
        shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in batch.tensors().items()]]
    dist.broadcast_object_list(shapes, src=0)
    device = current_platform().device
    received: dict[str, Any] = {}
    for name, shape, dtype in shapes[0]:
        # bool has no collective of its own in every backend.
        wire = torch.uint8 if dtype == torch.bool else dtype
        if batch is not None:
            tensor = batch.tensors()[name].to(device=device, dtype=wire).contiguous()
        else:
            tensor = torch.empty(shape, dtype=wire, device=device)
        dist.broadcast(tensor, src=0)
        received[name] = tensor.to(device="cpu", dtype=dtype)
    return ExperienceBatch(**received)


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
