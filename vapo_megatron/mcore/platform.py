"""The one object that knows what kind of machine this is. Nothing else asks."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch


@dataclass(frozen=True)
class Platform:
    """Device, collectives and the facts that depend on them."""

    device_type: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    start_method: Literal["fork", "spawn"]

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device_type == "cuda"

    @property
    def engines_share_device(self) -> bool:
        """Whether engines live in the trainer's memory, and so have to take turns with it."""
        return self.is_cuda

    @property
    def world_backend(self) -> str:
        """Backends of the world: words between ranks go over the CPU, so that a rank that waits for another one keeps
        no kernel spinning on a GPU on which an engine generates."""
        return "cpu:gloo,cuda:nccl" if self.is_cuda else "gloo"

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.is_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def has_transformer_engine(self) -> bool:
        """Whether Transformer Engine's layers can be used here."""
        if not self.is_cuda:
            return False
        from megatron.core.extensions.transformer_engine import HAVE_TE

        return bool(HAVE_TE)

    def device_count(self) -> int:
        """Accelerators of this machine; 0 where ranks run on the CPU."""
        return torch.cuda.device_count() if self.is_cuda else 0

    def bind(self, local_rank: int) -> None:
        """Tie this process to its accelerator, or to one thread."""
        if self.is_cuda:
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def synchronize(self) -> None:
        """Wait for the device's queue to empty."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached blocks back, so that an engine in another process can have them."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        """Bytes that this rank holds now: of the device, or resident on the CPU."""
        if self.is_cuda:
            return int(torch.cuda.memory_allocated())
        return int(psutil.Process().memory_info().rss)

    def memory_gauges(self) -> dict[str, tuple[Callable[[], object], Callable[[], int]]]:
        """High-water marks beside the host's, by name: how to reset one, and the bytes reached since."""
        if not self.is_cuda:
            return {}
        return {"device_memory": (torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated)}


@functools.cache
def current_platform() -> Platform:
    """The platform of this process, decided by whether CUDA works and not by how torch was built."""
    if torch.cuda.is_available():
        return Platform("cuda", "nccl", "spawn")
    return Platform("cpu", "gloo", "fork")
