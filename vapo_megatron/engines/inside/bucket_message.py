"""The announcement of a bucket of weights, and how a server finds the bucket's tensors."""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch

from vapo_megatron.weights.bucket import Bucket, Place, view

Purpose = Literal["load", "compare"]
"""load: replace the weights. compare: say which differ and change nothing."""


def announce(bucket: Bucket | None, purpose: Purpose, *, first: bool, last: bool) -> dict[str, Any]:
    """A bucket described in plain values; None is an empty bucket. first and last mark the ends of a weight sync.

    It says where in the bucket each tensor begins, but not where the bucket's bytes are.
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
    """The tensors of a description, as views of buffer or of the file at its "path"."""
    places = [Place(name, dtype, tuple(shape), start) for name, dtype, shape, start in description["places"]]
    if not places:
        return []
    if buffer is None:
        status = os.stat(description["path"])
        buffer = _map(description["path"], status.st_dev, status.st_ino, status.st_size)
    return [(place.name, view(buffer, place)) for place in places]


@lru_cache(maxsize=4)  # mapping anew costs a page fault every 4 KiB
def _map(path: str, device: int, inode: int, size: int) -> torch.Tensor:
    """The bytes of a file. Its path is that of another file once its sender has closed the first."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
