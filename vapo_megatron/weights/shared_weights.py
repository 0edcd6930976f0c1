"""Weights in memory that other processes of this machine read where it is.

Without a GPU an engine can so take a tensor out of the trainer's own parameter: of the two copies that a weight sync
through buckets makes of every byte, one is left.
"""

import mmap
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 8  # bytes of what checksum() adds up
_ALIGNMENT = 256  # bytes: no two storages share a cache line


class Whereabouts(NamedTuple):
    """Where other processes find a tensor: a file that they can map, its size, and the tensor's first byte in it."""

    path: str
    size: int
    start: int


class SharedWeights:
    """Storages moved into one run of host memory that any process of the same user can map.

    Anonymous (memfd), as SharedSlots: it goes with the processes that hold it, whatever the size of /dev/shm.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """tensors: on the CPU, every one through which a storage is reached; they are moved, each stays the same object
        and keeps its place within its storage, so that views of one another stay that."""
        found = list(tensors)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in found}
        sizes = {pointer: -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for pointer, storage in storages.items()}
        self._size = sum(sizes.values())
        self._fd = os.memfd_create("vapo-weights")
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        os.ftruncate(self._fd, self._size)
        memory, start = mmap.mmap(self._fd, self._size), 0
        self._starts: dict[int, int] = {}  # by the address of a storage
        moved: dict[int, Tensor] = {}
        for pointer, storage in storages.items():
            room = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=start)
            room.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            moved[pointer] = room
            self._starts[room.data_ptr()] = start
            start += sizes[pointer]
        for tensor in found:
            room = moved[tensor.untyped_storage().data_ptr()]
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(room.untyped_storage(), *place)

    def whereabouts(self, tensor: Tensor) -> Whereabouts | None:
        """Where a tensor is, None where it is not contiguous, not of this memory, or where checksums cannot be made
        of its words."""
        start = self._starts.get(tensor.untyped_storage().data_ptr())
        offset = int(tensor.storage_offset()) * tensor.itemsize
        if start is None or not tensor.is_contiguous() or offset % _WORD:
            return None
        return Whereabouts(self._path, self._size, start + offset)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
