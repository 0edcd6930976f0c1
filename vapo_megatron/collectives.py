"""Share values of one rank, or of each rank, with all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from vapo_megatron.errors import VapoError

T = TypeVar("T")


def on_rank_zero(function: Callable[[], T]) -> T:
    """Collective: the result of rank 0's call, or its error, on every rank.

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
    result_of_rank_zero: T = result
    return result_of_rank_zero


def gather_values(value: T, group: Any = None) -> list[T]:
    """Collective: on each rank, the picklable values of all ranks of a group, or of the world, in
    order of rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_value(value: Any) -> Any:
    """Collective: rank 0's picklable value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
