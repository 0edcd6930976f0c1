"""Ranks that are threads of this process, for code that moves samples between ranks and asks for
nothing else of them.

What they reach is seen by a tool that watches this process (tools/mutants.py), and they start in no
time.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


class _World:
    """torch.distributed as a thread has it: all that ranks hand over at a meeting is seen by
    each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()
        self.barrier = threading.Barrier(size, timeout=120)
        self.given: list[Any] = [None] * size

    def meet(self, given: Any) -> list[Any]:
        self.given[self.here.rank] = given
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX) and group is None
        found = torch.stack(self.meet(tensor.clone()))
        tensor.copy_(found.amax(0) if op == dist.ReduceOp.MAX else found.sum(0))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int]
    ) -> None:
        assert (
            output.dtype == given.dtype == torch.uint8
            and sum(gives) == len(given)
            and sum(takes) == len(output)
        )
        parts = [sent[self.here.rank] for sent in self.meet(given.split(list(gives)))]
        assert [len(part) for part in parts] == list(takes)
        output.copy_(torch.cat(parts))

    def broadcast_object_list(self, box: list[Any], src: int) -> None:
        box[:] = copy.deepcopy(self.meet(box)[src])

    def all_gather_object(self, found: list[Any], given: Any, group: Any = None) -> None:
        found[:] = self.meet(given)


def on_threads(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """fn(*args) on each of so many ranks; its results, by rank. The first exception is
    raised."""
    world = _World(size)
    answers = [None] * size
    failed = []

    def rank(number: int) -> None:
        world.here.rank = number
        try:
            answers[number] = fn(*args)
        except BaseException as error:
            failed.append(error)
            world.barrier.abort()

    collectives = {
        name: getattr(world, name)
        for name in vars(_World)
        if not name.startswith("_") and name != "meet"
    }
    seat = {
        "is_initialized": lambda: True,
        "get_world_size": lambda *_: size,
        "get_rank": lambda: world.here.rank,
    }
    with patch.multiple(dist, **collectives, **seat):
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return answers
