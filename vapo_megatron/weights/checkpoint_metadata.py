"""Reads the metadata of torch_dist checkpoints, a pickle, without running code from it."""

import collections
import dataclasses
import enum
import importlib
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

METADATA_FILE = ".metadata"

# Data classes and enumerations of these describe tensors and files; nothing else of them is called.
_DESCRIBE = tuple(
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem")
)


def _member_of_enum(kind: Any, name: Any) -> Any:
    """As getattr, which Python 3.11.0 to 3.11.3 write for a member of an enumeration."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which is no member of it")
    return kind[name]


_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _member_of_enum,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # from Python 3.13 on
}


class _Unpickler(pickle.Unpickler):
    """Finds only what a checkpoint's metadata is made of."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of the allow-list.

        Raises:
            pickle.UnpicklingError: it is none of them.
        """
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _DESCRIBE and "." not in name:
            kind = getattr(importlib.import_module(module), name, None)
            is_enum = isinstance(kind, enum.EnumMeta)
            if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or is_enum):
                return kind
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint's metadata has"
        )


class MetadataReader(FileSystemReader):
    """torch's reader, with metadata that cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata of the folder.

        Raises:
            pickle.UnpicklingError: it is damaged, or names what no checkpoint needs.
        """
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no checkpoint's metadata")
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        return metadata
