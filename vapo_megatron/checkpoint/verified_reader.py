"""Reading a model's checkpoint once: a piece of a file is compared with its digest by the rank that loads it."""

import hashlib
import io
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from vapo_megatron.checkpoint.manifest import Damaged, FileFacts, changed, damaged
from vapo_megatron.megatron.platform import current_platform


class VerifyingReader(FileSystemReader):
    """torch's reader of a folder, whose metadata is read once, and no piece of which is used that has changed.

    Args:
        folder: of a model in a checkpoint.
        files: those of it whose pieces have digests; others are read as they are.
        before_reading: called with the files that are read next; on all ranks together, as torch reads.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, FileFacts],
        before_reading: Callable[[set[str]], None] | None = None,
    ) -> None:
        super().__init__(folder)
        self._folder, self._files, self._before_reading = folder, files, before_reading
        self._metadata: Any = None
        self._loaded: set[tuple[str, int]] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, from memory after the first time."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """As torch's."""
        if self._before_reading is not None:
            self._before_reading({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """What torch reads of a file: a piece. Raises Damaged."""
        if sinfo.relative_path not in self._files:
            return super()._slice_file(file, sinfo)
        content, wrong = self._piece(file, sinfo.relative_path, sinfo.offset, sinfo.length)
        if wrong is not None:
            raise damaged(self._folder.parent, wrong)
        self._loaded.add((sinfo.relative_path, sinfo.offset))
        return io.BytesIO(content)

    def check_rest(self) -> None:
        """Collective: compare the pieces that no rank has loaded, each rank a share of them. Raises Damaged."""
        rank, world = dist.get_rank(), dist.get_world_size()
        places = [
            (name, *ends)
            for name, facts in self._files.items()
            for ends in pairwise([*sorted(facts.pieces), facts.bytes])
        ]
        unread = torch.tensor([(name, start) not in self._loaded for name, start, _ in places], dtype=torch.uint8)
        unread = unread.to(current_platform().device)
        if places:
            dist.all_reduce(unread, op=dist.ReduceOp.MIN)
        rest = [place for place, is_unread in zip(places, unread.tolist(), strict=True) if is_unread]
        refuse_together(self._folder.parent, next(filter(None, map(self._check, rest[rank::world])), None))

    def _check(self, place: tuple[str, int, int]) -> str | None:
        name, start, stop = place
        try:
            with (self._folder / name).open("rb") as file:
                return self._piece(file, name, start, stop - start)[1]
        except OSError as error:
            return f"{self._folder.name}/{name} cannot be read ({error.strerror})"

    def _piece(self, file: Any, name: str, start: int, length: int) -> tuple[bytes, str | None]:
        """The bytes of a piece, and what is wrong with them."""
        file.seek(start)
        content = file.read(length)
        found, expected = hashlib.sha256(content).hexdigest(), self._files[name].pieces.get(start, "nothing of it")
        return content, None if found == expected else changed(f"{self._folder.name}/{name}", found, expected)


class VerifyingStrategy(torch_strategies.TorchDistLoadShardedStrategy):
    """Megatron's, with a reader of ours."""

    def __init__(self, reader: VerifyingReader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """As Megatron's, which makes a reader of its own."""
        theirs = torch_strategies._get_filesystem_reader
        torch_strategies._get_filesystem_reader = lambda *_, **__: self._reader
        try:
            return super().load(sharded_state_dict, checkpoint_dir)
        finally:
            torch_strategies._get_filesystem_reader = theirs


def refuse_damage(error: BaseException) -> None:
    """Raises Damaged where that is what a load failed with on some rank; torch tells all ranks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for cause, _ in failures:
        if isinstance(cause, Damaged):
            raise Damaged(str(cause), shared=True) from None


def refuse_together(checkpoint: Path, wrong: str | None) -> None:
    """Collective: raises Damaged on every rank where something is wrong that one of them has read."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    first = next((text for text in found if text is not None), None)
    if first is not None:
        error = damaged(checkpoint, first)
        error.shared = True
        raise error
