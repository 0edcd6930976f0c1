"""Moving what rank 0 knows to every rank."""

from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.platform import current_platform


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


def broadcast_value(value: Any) -> Any:
    """Collective: rank 0's picklable value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
