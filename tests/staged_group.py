"""Collectives of several ranks on one GPU, which NCCL refuses: over gloo, each tensor by way of
host memory.

They show what layers and kernels compute in a layout. Nothing of NCCL, and no speed, can be seen in
this way.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.megatron.platform import current_platform

NAME = "staged"


def use_staged_groups() -> None:
    """In this process: groups that would be NCCL's are of this kind, the world's too."""
    dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    # A frozen dataclass, of which there is one
    object.__setattr__(current_platform(), "backend", NAME)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> "StagedGroup":
    return StagedGroup(store, rank, size, timeout)


class _Work:
    """A message under way: the rest of the work when it is waited for."""

    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class StagedGroup(dist.ProcessGroup):
    """The calls of torch.distributed that Megatron-Core and Transformer Engine make. Collectives
    end before they return; a message to a rank ends when it is waited for."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:
        return NAME

    def _whole(
        self, outputs: list[torch.Tensor], call: Callable[[list[torch.Tensor]], Any]
    ) -> _Work:
        """A collective on copies of tensors that it changes."""
        copies = [_host(tensor) for tensor in outputs]
        call(copies).wait()
        with torch.no_grad():
            for tensor, copy in zip(outputs, copies, strict=True):
                tensor.copy_(copy)
        return _Work()

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._whole(tensors, lambda copies: self._gloo.broadcast(copies, options))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        return self._whole(tensors, lambda copies: self._gloo.allreduce(copies, options))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        for tensor in tensors:
            one = dist.AllreduceOptions()
            one.reduceOp = options.reduceOp
            self.allreduce([tensor], one)
        return _Work()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> _Work:
        (places,), (mine,) = outputs, inputs
        return self._whole(places, lambda copies: self._gloo.allgather([copies], [_host(mine)]))

    def _allgather_base(
        self, output: torch.Tensor, mine: torch.Tensor, options: Any = None
    ) -> _Work:
        return self._whole(
            [output], lambda copies: self._gloo._allgather_base(copies[0], _host(mine))
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> _Work:
        for output, mine in zip(outputs, inputs, strict=True):
            self._allgather_base(output, mine)
        return _Work()

    def _reduce_scatter_base(
        self, output: torch.Tensor, whole: torch.Tensor, options: Any
    ) -> _Work:
        summed = _host(whole)
        reduced = dist.AllreduceOptions()
        reduced.reduceOp = options.reduceOp
        self._gloo.allreduce([summed], reduced).wait()
        with torch.no_grad():
            output.copy_(summed.flatten().chunk(self.size())[self.rank()].view_as(output))
        return _Work()

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> _Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, options)
        return _Work()

    def alltoall_base(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        received: list[int],
        sent: list[int],
        options: Any = None,
    ) -> _Work:
        return self._whole(
            [output],
            lambda copies: self._gloo.alltoall_base(
                copies[0], _host(mine), received, sent, dist.AllToAllOptions()
            ),
        )

    # The same under the names that PyTorch has given them since 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        copies = [_host(tensor) for tensor in tensors]
        sending = self._gloo.send(copies, peer, tag)
        return _Work(lambda: (sending.wait(), copies))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        copies = [_host(tensor) for tensor in tensors]
        receiving = self._gloo.recv(copies, peer, tag)

        def finish() -> None:
            receiving.wait()
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)

        return _Work(finish)
