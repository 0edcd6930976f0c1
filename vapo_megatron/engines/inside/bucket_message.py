"""What the announcement of one bucket of weights says, and how it finds the tensors."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from vapo_megatron.weights.bucket import Bucket, Place, view

Purpose = Literal["load", "compare"]
"""load: replace the weights. compare: say which differ and change nothing."""

# Files of weights that this process has mapped, by device and inode. Mapping anew costs a page fault every 4 KiB.
_mapped: dict[tuple[int, int], torch.Tensor] = {}
_MOST_MAPPED = 4


def announce(bucket: Bucket | None, purpose: Purpose, *, first: bool, last: bool) -> dict[str, Any]:
    """A description of a bucket in plain values; None is an empty one. first and last mark the ends of a weight sync.

    It says where each tensor begins, but not where the bytes are.
    """
    places: Sequence[Place] = [] if bucket is None else bucket.places
    return {
        "places": [tuple(place) for place in places],
        "size": 0 if bucket is None else bucket.buffer.numel(),
        "purpose": purpose,
        "first": first,
        "last": last,
    }


def unpack(description: Mapping[str, Any], buffer: torch.Tensor | None = None) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a description whose bytes are in buffer, or in the file of its "path". They are views."""
    places = [Place(name, dtype, tuple(shape), start) for name, dtype, shape, start in description["places"]]
    if not places:
        return []
    if buffer is None:
        buffer = _map(description["path"], description["size"])
    return [(place.name, view(buffer, place)) for place in places]


def _map(path: str, size: int) -> torch.Tensor:
    status = os.stat(path)
    key = (status.st_dev, status.st_ino)  # a path is that of another file once its sender has closed the first
    mapping = _mapped.pop(key, None)
    if mapping is None or mapping.numel() < size:
        mapping = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    _mapped[key] = mapping  # again the youngest
    while len(_mapped) > _MOST_MAPPED:
        del _mapped[next(iter(_mapped))]
    return mapping
