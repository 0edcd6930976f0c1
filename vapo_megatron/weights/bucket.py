"""A bucket of named tensors laid out as one flat run of bytes, and the memory that buckets are put into."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]

T = TypeVar("T")

_ALIGNMENT = 16  # bytes: a slice can be viewed as any dtype


def batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items of together at most limit bytes, or one that is larger."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


class Place(NamedTuple):
    """Where one tensor lies: its name, dtype (as in torch.<dtype>), shape, and first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without what aligns the next one."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def lay_out(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> tuple[list[Place], int]:
    """Places for tensors of given names, dtypes and shapes, and the bytes they take together."""
    places = []
    end = 0
    for name, dtype, shape in tensors:
        place = Place(name, str(dtype).removeprefix("torch."), tuple(shape), end)
        places.append(place)
        end += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def view(buffer: Tensor, place: Place) -> Tensor:
    """The tensor of a place, as a view of the uint8 buffer."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    return buffer[place.start : place.start + place.nbytes].view(dtype).view(place.shape)


class Bucket(list[tuple[str, Tensor]]):
    """(name, tensor) pairs whose tensors are contiguous views of one uint8 buffer, in some memory, at `places`."""

    def __init__(self, memory: "Memory", places: Sequence[Place], size: int) -> None:
        self.memory, self.places = memory, places
        self.buffer = memory.buffer[:size]
        super().__init__((place.name, view(self.buffer, place)) for place in places)
        self._checksums: list[int] | None = None

    def checksums(self) -> list[int]:
        """checksum() of each tensor, as it was when they were asked for first; on a GPU all at once."""
        if self._checksums is None:
            sums = [_sum_of_words(tensor.reshape(-1).view(torch.uint8)) for _, tensor in self]
            self._checksums = torch.stack(sums).tolist() if sums else []
        return self._checksums


def pack(bucket: NamedTensors, memory: "Memory") -> Bucket:
    """Copy tensors, wherever they are, into memory that is large enough."""
    places, size = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in bucket)
    packed = Bucket(memory, places, size)
    for (_, target), (_, tensor) in zip(packed, bucket, strict=True):
        target.copy_(tensor)
    return packed


def packed_size(bucket: NamedTensors) -> int:
    """Bytes of memory that pack() needs."""
    return lay_out((name, tensor.dtype, tensor.shape) for name, tensor in bucket)[1]


def checksum(tensor: Tensor) -> int:
    """The sum of a contiguous tensor's bytes as 64-bit words, modulo 2^64: any one damaged word changes it."""
    return int(_sum_of_words(tensor.reshape(-1).view(torch.uint8)))


def _sum_of_words(raw: Tensor) -> Tensor:
    words = raw.numel() // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)


@dataclass(frozen=True)
class Memory:
    """A run of bytes for one bucket. path: of the file that other processes of this machine map to read the same."""

    buffer: Tensor
    path: str | None = None


class DeviceSlots:
    """Two buffers on a device that are filled in turn, and grow to the largest bucket. What was put there two
    buckets before is gone."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def take(self, index: int, nbytes: int) -> Memory:
        """The buffer whose turn it is, at least so large."""
        if self._buffers[index % 2].numel() < nbytes:
            # The old one is dropped first, so that both are never there at once.
            self._buffers[index % 2] = self._buffers[index % 2].new_empty(0)
            self._buffers[index % 2] = self._buffers[index % 2].new_empty(nbytes)
        return Memory(self._buffers[index % 2])

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]


class SharedSlots:
    """Two buffers of host memory that any process of the same user can map. Anonymous (memfd): they go with the
    processes that hold them, however these end, and are not bound by the size of /dev/shm."""

    def __init__(self) -> None:
        self._fds = [os.memfd_create(f"vapo-weights-{i}") for i in range(2)]
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in self._fds]

    def take(self, index: int, nbytes: int) -> Memory:
        """The buffer whose turn it is, at least so large."""
        slot = index % 2
        path = f"/proc/{os.getpid()}/fd/{self._fds[slot]}"
        if self._buffers[slot].numel() < nbytes:
            os.ftruncate(self._fds[slot], nbytes)
            self._buffers[slot] = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return Memory(self._buffers[slot], path)

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in self._buffers]
        for fd in self._fds:
            os.close(fd)
        self._fds = []
