"""A directory of weights as one weight sync leaves it to a server: safetensors in the order of their names."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vapo_megatron.weights.bucket import NamedTensors


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
