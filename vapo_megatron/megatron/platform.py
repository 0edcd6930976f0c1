"""The platform: device, backends and what depends on them. No other module asks what the machine
is."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch


@dataclass(frozen=True)
class Platform:
    """Device, collectives and what depends on them."""

    device_type: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    start_method: Literal["fork", "spawn"]

    @property
    def is_cuda(self) -> bool:
        """Whether tensors, and the engines started beside the ranks, are on a GPU, which they then
        use in turns."""
        return self.device_type == "cuda"

    @property
    def world_backend(self) -> str:
        """Backends of the world. Messages between ranks go over the CPU, so that a waiting rank
        keeps no kernel spinning on a GPU on which an engine generates."""
        return f"cpu:gloo,cuda:{self.backend}" if self.is_cuda else "gloo"

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

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Compute capability of this rank's GPU, such as (9, 0) for an H100; (0, 0) on the CPU."""
        return torch.cuda.get_device_capability() if self.is_cuda else (0, 0)

    @property
    def cuda_version(self) -> tuple[int, int]:
        """CUDA version that torch was built for, such as (13, 0); (0, 0) on the CPU."""
        if not self.is_cuda or torch.version.cuda is None:
            return (0, 0)
        major, minor = torch.version.cuda.split(".")[:2]
        return int(major), int(minor)

    def capabilities(self, attention: str = "auto") -> str:
        """For the head of a run: the chip, and whose layers are used."""
        if not self.is_cuda:
            return "CPU"
        major, minor = self.compute_capability
        fused = attention != "sdpa" and self.has_transformer_engine
        layers = "Transformer Engine" if fused else "PyTorch's layers, no FP8"
        return f"{torch.cuda.get_device_name()} (sm_{major}{minor}), {layers}"

    def copy_queue(self) -> "CopyQueue":
        """A queue for copies that overlap with the computation."""
        return CopyQueue(torch.cuda.Stream() if self.is_cuda else None)

    def device_count(self) -> int:
        """Accelerators of this machine; 0 where ranks run on the CPU."""
        return torch.cuda.device_count() if self.is_cuda else 0

    def bind(self, local_rank: int) -> None:
        """Bind this process to its accelerator, or to one thread."""
        if self.is_cuda:
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            _keep_freed_memory()

    def use_threads(self, count: int) -> None:
        """Compute with so many threads; an accelerator takes no notice."""
        if not self.is_cuda:
            torch.set_num_threads(count)

    def synchronize(self) -> None:
        """Wait for the device's queue to empty."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Release cached blocks, so that an engine in another process can use them."""
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif _c_library() is not None:
            _c_library().malloc_trim(0)

    def synchronize_stream(self) -> None:
        """Wait for this thread's work on its current stream; other streams continue."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def free_bytes(self) -> int:
        """Bytes of the device that nobody has taken, less 1 GiB; 0 on the CPU, where nothing is
        copied beside anything else."""
        return max(0, torch.cuda.mem_get_info()[0] - (1 << 30)) if self.is_cuda else 0

    def device_bytes(self) -> int:
        """Bytes of the device's memory; 0 on the CPU."""
        return int(torch.cuda.mem_get_info()[1]) if self.is_cuda else 0

    def release_ipc_memory(self) -> None:
        """Release device memory that other processes had opened and have closed."""
        if self.is_cuda:
            torch.cuda.ipc_collect()
        self.empty_cache()

    def memory_bytes(self) -> int:
        """Bytes that this rank holds now: on the device, or resident on the CPU."""
        if self.is_cuda:
            return int(torch.cuda.memory_allocated())
        return int(psutil.Process().memory_info().rss)

    @contextlib.contextmanager
    def allocations_recorded(self) -> Iterator[Callable[[str], None]]:
        """Record the history of allocations in the body; yields a function that writes it to a
        file, and does nothing off CUDA."""
        if not self.is_cuda:
            yield lambda path: None
            return
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        try:
            yield torch.cuda.memory._dump_snapshot
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def memory_gauges(self) -> dict[str, tuple[Callable[[], object], Callable[[], int]]]:
        """High-water marks beside the host's, by name: a function that resets one, and one that
        reads it in bytes."""
        if not self.is_cuda:
            return {}
        return {
            "device_memory": (torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated)
        }


class CopyQueue:
    """Copies beside the computation, on their own stream; without streams they are done at once."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def behind_computation(self) -> Iterator[None]:
        """Kernels launched in the body go to this queue's stream, after everything on the
        computation's stream until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of the copies queued until now."""
        return self._stream.record_event() if self._stream is not None else None

    def hold_computation_until(self, mark: torch.cuda.Event | None) -> None:
        """Kernels launched on the computation's stream from now on wait for a mark; this process
        does not."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def finish(self) -> None:
        """Wait, in this process, for everything in the queue."""
        if self._stream is not None:
            self._stream.synchronize()


@functools.cache
def _c_library() -> Any:
    """The C library of this process, if it is glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def _keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed heap for the next micro-batch, until empty_cache. By default glibc
    returns it to the system whenever the end of the heap happens to be free, and faulting it in
    again takes up to a tenth of a step."""
    # <malloc.h>; setting one of them ends glibc's own choice of both
    mmap_threshold = -3
    trim_threshold = -1
    if _c_library() is not None:
        _c_library().mallopt(mmap_threshold, 32 << 20)
        _c_library().mallopt(trim_threshold, 1 << 30)


@functools.cache
def current_platform() -> Platform:
    """The platform of this process, decided by whether CUDA works and not by how torch was
    built."""
    if torch.cuda.is_available():
        return Platform("cuda", "nccl", "spawn")
    return Platform("cpu", "gloo", "fork")
