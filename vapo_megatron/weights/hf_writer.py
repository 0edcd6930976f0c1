"""Writing a Hugging Face directory: shards of bounded size as tensors come, all of it or nothing."""

import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vapo_megatron.config.atomic import follow_umask, sync
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.hf_card import CONFIG, copy_carried, shard_names, write_index, write_json

MAX_SHARD_BYTES = 2 << 30


class HFWriter:
    """A directory in the making, beside the place where it will be; a context manager.

    On leaving without an exception the directory takes its place, replacing a model directory that is there; on any
    exception it vanishes. Memory: one shard.

    Raises:
        BadInput: at any point where the file system refuses (full disk, no permission), or where out_dir holds
            something that is not a model.
    """

    def __init__(
        self,
        out_dir: Path,
        config: dict[str, Any],
        source_dir: Path,
        carried: tuple[str, ...],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """config: content of config.json. carried: names that are copied from source_dir where they are there."""
        self._out_dir, self._config, self._source_dir, self._carried = out_dir, config, source_dir, carried
        self._max_bytes = max_shard_bytes
        self._temporary = out_dir.with_name(f".{out_dir.name}.{secrets.token_hex(4)}")
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def __enter__(self) -> Self:
        check_replaceable(self._out_dir)
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise self._refused(error) from None
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it is copied off its device now and written when its shard is full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._write_shard()
        self._pending[name] = tensor.detach().to("cpu", copy=True)
        self._pending_bytes += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _write_shard(self) -> None:
        path = self._temporary / f"{len(self._shards):05d}"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
            follow_umask(path)
            sync(path)
        except (SafetensorError, OSError) as error:
            raise self._refused(error) from None
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._write_shard()
        try:
            self._name_shards()
            write_json(self._temporary / CONFIG, self._config)
            copy_carried(self._source_dir, self._temporary, self._carried)
            sync(self._temporary)
            self._put_in_place()
        except OSError as error:
            raise self._refused(error) from None

    def _name_shards(self) -> None:
        for i, name in enumerate(shard_names(len(self._shards))):
            os.replace(self._temporary / f"{i:05d}", self._temporary / name)
        write_index(self._temporary, self._shards, self._total)

    def _put_in_place(self) -> None:
        """A directory cannot be exchanged in one step where it exists: the old one moves aside for an instant."""
        old = self._out_dir.with_name(f"{self._temporary.name}.old")
        if self._out_dir.exists():
            os.replace(self._out_dir, old)
        os.replace(self._temporary, self._out_dir)
        sync(self._out_dir.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _refused(self, error: Exception) -> BadInput:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
        return BadInput(f"{self._out_dir}: cannot be written ({reason}): free or name another place")


def check_replaceable(directory: Path) -> None:
    """Raises BadInput where something is there that is neither a model's directory nor an empty one."""
    if (
        directory.exists()
        and not (directory / CONFIG).is_file()
        and not (directory.is_dir() and not any(directory.iterdir()))
    ):
        raise BadInput(f"{directory}: exists and is not a model directory; name another place")
