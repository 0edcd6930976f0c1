"""Reading the tensors of a Hugging Face directory, a slice at a time."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.errors import BadInput

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")


class FileTensor:
    """A tensor in a memory-mapped file; an index reads only what it asks for."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.shape: tuple[int, ...] = tuple(view.get_shape())
        self.dtype: str = view.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        return self._view[index]


class HFTensors:
    """The tensors of a directory with model.safetensors, or with shards and their index. Opening reads the headers
    alone, which are checked against the size of the files. Raises BadInput where a file is missing, truncated or
    otherwise unreadable, or the index does not agree with its shards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._places: dict[str, Path] = {}
        index = directory / INDEX_FILE
        if index.is_file():
            self._open_shards(index)
        elif (directory / SINGLE_FILE).is_file():
            self._places = dict.fromkeys(self._open(directory / SINGLE_FILE), directory / SINGLE_FILE)
        else:
            raise BadInput(
                f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}; give a directory with safetensors weights"
            )

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._places)

    def __getitem__(self, name: str) -> FileTensor:
        path = self._places[name]
        try:
            return FileTensor(self._files[path].get_slice(name))
        except SafetensorError as error:
            raise BadInput(f"{path}: tensor {name} cannot be read ({error}); fetch the file again") from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises BadInput where a tensor has another shape, or is not of floating point."""
        tensor, path = self[name], self._places[name]
        if tensor.shape != shape:
            raise BadInput(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)} by config.json; "
                "the two do not belong together"
            )
        if tensor.dtype not in FLOATING:
            raise BadInput(
                f"{path}: tensor {name} has dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}: quantised "
                "weights cannot be trained, give the original"
            )

    def _open(self, path: Path) -> Iterable[str]:
        """Open a file and return the names in it."""
        try:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise BadInput(f"{path}: no such file, but {INDEX_FILE} names it; fetch it") from None
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: truncated or no safetensors file ({error}); fetch it again") from None
        return self._files[path].keys()

    def _open_shards(self, index: Path) -> None:
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = {name: index.parent / str(file) for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{index}: no readable weight_map ({type(error).__name__}: {error}); fetch it again"
            ) from None
        for path in sorted(set(shards.values())):
            self._places |= dict.fromkeys(self._open(path), path)
        for name, path in shards.items():
            if self._places.get(name) != path:
                raise BadInput(
                    f"{index}: tensor {name} is not in {path.name}, where the index has it; fetch both again"
                )
