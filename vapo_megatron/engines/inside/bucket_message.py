"""What the announcement of one bucket of weights says, and how it finds the tensors."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vapo_megatron.weights.bucket import Bucket, NamedTensors, Place, view

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


def write_tensors(directory: Path, index: int, tensors: NamedTensors) -> list[str]:
    """Write file `index` of a directory. Returns the names in the order in which read_tensors will yield them."""
    path = directory / f"{index:05d}.safetensors"
    save_file(dict(tensors), path)
    with safe_open(path, framework="pt") as stored:
        return list(stored.keys())


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor), file after file; one tensor in memory at a time."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                yield name, stored.get_tensor(name)
