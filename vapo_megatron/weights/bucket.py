"""Buckets of named tensors in one flat run of bytes, the memory for them, and how they are
announced to an engine."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]
Purpose = Literal["load", "compare", "cover"]
"""load: replace the weights. compare: say which differ and change nothing. cover: the bytes are a
mask of own shares; say whether the engine's rank reads nothing else."""

NEEDS_GATHERED = "own shares came for a bucket of which the engine may read more"
"""An engine's answer to a bucket of own shares that it cannot take: whole tensors are sent
instead."""

T = TypeVar("T")

_ALIGNMENT = 16  # bytes: a slice can be viewed as any dtype


def batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Groups of consecutive items with at most `limit` bytes; a larger item forms a group alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > limit:
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


class Place(NamedTuple):
    """Place of one tensor: its name, dtype (as in torch.<dtype>), shape, and first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, alignment not included."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def lay_out(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> tuple[list[Place], int]:
    """Places for tensors of these names, dtypes and shapes, and their total bytes."""
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
    """(name, tensor) pairs whose tensors are contiguous views of one uint8 buffer, in some memory,
    at `places`.

    own_shares: whether only this tensor-parallel rank's shares of the tensors are in their places.
        All else is left over from other buckets.
    """

    def __init__(
        self, memory: "Memory", places: Sequence[Place], size: int, own_shares: bool = False
    ) -> None:
        self.memory = memory
        self.places = places
        self.own_shares = own_shares
        self.buffer = memory.buffer[:size]
        # What parts two tensors is zero, so that a tensor's sum is the sum of all words up to the
        # next one.
        for place in places:
            if place.nbytes % _ALIGNMENT:
                end = place.start + place.nbytes
                self.buffer[end : -(-end // _ALIGNMENT) * _ALIGNMENT].zero_()
        super().__init__((place.name, view(self.buffer, place)) for place in places)
        self._checksums: list[int] | None = None

    def checksums(self) -> list[int]:
        """sum_of_words() of each tensor, computed on the first call; on a GPU in one go."""
        if self._checksums is None:
            self._checksums = sums_of_places(self.buffer, self.places)
        return self._checksums


def pack(bucket: NamedTensors, slots: "DeviceSlots | SharedSlots", index: int = 0) -> Bucket:
    """Copy tensors from any device into one of two buffers."""
    places, size = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in bucket)
    own_shares = isinstance(bucket, Bucket) and bucket.own_shares
    packed = Bucket(slots.take(index, size), places, size, own_shares)
    for (_, target), (_, tensor) in zip(packed, bucket, strict=True):
        target.copy_(tensor)
    return packed


def sum_of_words(raw: Tensor) -> Tensor:
    """A checksum: the sum of contiguous bytes as 64-bit words, modulo 2^64, on their device; zeros
    fill the last word up. Damage to any single word changes it."""
    words = raw.numel() // 8 * 8
    rest = raw.new_zeros(8)
    rest[: raw.numel() - words] = raw[words:]
    return raw[:words].view(torch.int64).sum() + rest.view(torch.int64)[0]


# Words that are added up at once on a GPU, for which as much memory is needed again.
_WORDS_AT_ONCE = 8 << 20


def sums_of_places(buffer: Tensor, places: Sequence[Place]) -> list[int]:
    """sum_of_words() of the tensors at consecutive places of a bucket's bytes, in few passes over
    them."""
    starts = [place.start // 8 for place in places if place.nbytes]
    if not starts:
        return [0] * len(places)
    words = buffer[: buffer.numel() // 8 * 8].view(torch.int64)
    if words.is_cpu:
        sums = np.add.reduceat(words.numpy(), starts).tolist()
    else:
        sums = _differences_of_prefixes(words, starts)
    found = iter(sums)
    return [next(found) if place.nbytes else 0 for place in places]


def _differences_of_prefixes(words: Tensor, starts: Sequence[int]) -> list[int]:
    """The sums of runs of words, each up to the start of the next, modulo 2^64."""
    ends = torch.tensor([*starts[1:], len(words)], device=words.device)
    before = torch.zeros((), dtype=torch.int64, device=words.device)
    prefixes = torch.zeros(len(starts), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _WORDS_AT_ONCE):
        summed = words[first : first + _WORDS_AT_ONCE].cumsum(0) + before
        here = (ends > first) & (ends <= first + len(summed))
        prefixes[here] = summed[ends[here] - first - 1]
        before = summed[-1]
    return torch.diff(prefixes, prepend=prefixes.new_zeros(1)).tolist()


@dataclass(frozen=True)
class Memory:
    """Bytes for one bucket. path: the file that other processes of this machine map to read
    them."""

    buffer: Tensor
    path: str | None = None


class DeviceSlots:
    """Two buffers on a device, filled in turn, which grow to the largest bucket. A bucket is
    overwritten by the next but one."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def take(self, index: int, nbytes: int) -> Memory:
        """The next buffer, with at least this size."""
        if self._buffers[index % 2].numel() < nbytes:
            # The old one is dropped first, so that both are never there at once.
            self._buffers[index % 2] = self._buffers[index % 2].new_empty(0)
            self._buffers[index % 2] = self._buffers[index % 2].new_empty(nbytes)
        return Memory(self._buffers[index % 2])

    def close(self) -> None:
        """Release the memory."""
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]


class SharedSlots:
    """Two buffers of host memory that any process of the same user can map. They are anonymous
    (memfd): they vanish with the processes that hold them, however those end, and the size of
    /dev/shm does not limit them."""

    def __init__(self) -> None:
        self._fds = [os.memfd_create(f"vapo-weights-{i}") for i in range(2)]
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in self._fds]

    def take(self, index: int, nbytes: int) -> Memory:
        """The next buffer, with at least this size."""
        slot = index % 2
        path = f"/proc/{os.getpid()}/fd/{self._fds[slot]}"
        if self._buffers[slot].numel() < nbytes:
            os.ftruncate(self._fds[slot], nbytes)
            self._buffers[slot] = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return Memory(self._buffers[slot], path)

    def close(self) -> None:
        """Release the memory."""
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in self._buffers]
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def announce(bucket: Bucket | None, purpose: Purpose, *, first: bool, last: bool) -> dict[str, Any]:
    """A bucket described in plain values; None is an empty bucket. first and last mark the ends of
    a weight sync.

    It says where in the bucket each tensor begins, but not where the bucket's bytes are.
    """
    places: Sequence[Place] = [] if bucket is None else bucket.places
    message = {
        "places": [tuple(place) for place in places],
        "size": 0 if bucket is None else bucket.buffer.numel(),
        "purpose": purpose,
        "first": first,
        "last": last,
    }
    # Never said to engines elsewhere, which may be of another version (remote_engines.PROTOCOL)
    if bucket is not None and bucket.own_shares:
        message["own_shares"] = True
    return message


def places_of(description: Mapping[str, Any]) -> tuple[Place, ...]:
    """The places of the tensors of a description."""
    return tuple(
        Place(name, dtype, tuple(shape), start)
        for name, dtype, shape, start in description["places"]
    )


def buffer_of(description: Mapping[str, Any], buffer: Tensor | None = None) -> Tensor:
    """The bytes of a description: in a buffer, or in the file at its "path"."""
    if not description["places"]:
        return torch.empty(0, dtype=torch.uint8)
    if buffer is None:
        status = os.stat(description["path"])
        buffer = _map(description["path"], status.st_dev, status.st_ino, status.st_size)
    return buffer[: description["size"]]


@lru_cache(maxsize=4)  # mapping again costs a page fault every 4 KiB
def _map(path: str, device: int, inode: int, size: int) -> Tensor:
    """The bytes of a file. Its path is another file's once its sender has closed the
    first."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
