"""A bucket of named tensors laid out as one flat run of bytes, and the two ways it reaches a server of this machine.

Without a GPU the bytes lie in anonymous shared memory (memfd): it goes with its owner, however that one ends, and is
not bound by the size of /dev/shm. With CUDA they lie in device memory, and its IPC handle travels.
"""

import os
import pickle
from collections.abc import Sequence
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NamedTuple, Protocol

import torch

NamedTensors = Sequence[tuple[str, torch.Tensor]]
Purpose = Literal["load", "compare"]

_ALIGNMENT = 16  # bytes: a slice can be viewed as any dtype


class Entry(NamedTuple):
    """Where one tensor lies: its name, dtype (as in torch.<dtype>), shape, and first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def lay_out(bucket: NamedTensors) -> tuple[list[Entry], int]:
    """Places for the tensors of a bucket, and the bytes they take together."""
    entries = []
    end = 0
    for name, tensor in bucket:
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return entries, end


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The entry's tensor as a view of the uint8 buffer."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    return buffer[entry.start : entry.start + count * dtype.itemsize].view(dtype).view(entry.shape)


def unpack(payload: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a payload, in the server. They are views: copy them before answering."""
    entries = [Entry(*entry) for entry in payload["entries"]]
    if not entries:
        return []
    buffer = payload.get("buffer")
    if buffer is None:
        buffer = torch.from_file(payload["path"], shared=False, size=payload["size"], dtype=torch.uint8)
    return [(entry.name, view(buffer, entry)) for entry in entries]


class WeightBuffer(Protocol):
    """Memory that is filled with one bucket after another."""

    def pack(self, bucket: NamedTensors, purpose: Purpose, *, first: bool = False, last: bool = False) -> bytes:
        """Copy a bucket in and return what tells a server on this machine of it: one payload, good for one reader.

        first and last mark the ends of a whole hand-over. What was packed before is overwritten.
        """

    def close(self) -> None:
        """Give the memory back."""


def _fill(buffer: torch.Tensor, bucket: NamedTensors, entries: Sequence[Entry]) -> None:
    for (_, tensor), entry in zip(bucket, entries, strict=True):
        view(buffer, entry).copy_(tensor)


def _describe(entries: Sequence[Entry], purpose: Purpose, first: bool, last: bool) -> dict[str, Any]:
    # Plain tuples: the server unpickles nothing but builtins and tensors.
    return {"entries": [tuple(entry) for entry in entries], "purpose": purpose, "first": first, "last": last}


class SharedMemoryBuffer:
    """Host memory that other processes of this user map by path."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("vapo-weights")
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pack(self, bucket: NamedTensors, purpose: Purpose, *, first: bool = False, last: bool = False) -> bytes:
        """See WeightBuffer. The payload may be read by any number of readers."""
        entries, size = lay_out(bucket)
        if size > self._buffer.numel():
            os.ftruncate(self._fd, size)
            self._buffer = torch.from_file(f"/proc/self/fd/{self._fd}", shared=True, size=size, dtype=torch.uint8)
        _fill(self._buffer, bucket, entries)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return pickle.dumps({**_describe(entries, purpose, first, last), "path": path, "size": size})

    def close(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        os.close(self._fd)


class DeviceBuffer:
    """GPU memory whose CUDA IPC handle travels. The reader must have copied it when it answers."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def pack(self, bucket: NamedTensors, purpose: Purpose, *, first: bool = False, last: bool = False) -> bytes:
        """See WeightBuffer. To be read by the server's process on the same GPU."""
        # Trainer and server may number the GPUs differently; SGLang's reductions name them by UUID, on both sides.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        entries, size = lay_out(bucket)
        if size > self._buffer.numel():
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        _fill(self._buffer, bucket, entries)
        torch.cuda.synchronize(self._buffer.device)
        payload = _describe(entries, purpose, first, last)
        if entries:
            payload["buffer"] = self._buffer
        stream = BytesIO()
        ForkingPickler(stream).dump(payload)
        return stream.getvalue()

    def close(self) -> None:
        """Give the memory back."""
        self._buffer = self._buffer.new_empty(0)
        torch.cuda.ipc_collect()
