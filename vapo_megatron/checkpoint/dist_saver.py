"""Writing and reading torch_dist checkpoints in parts: planned together, written by each rank
alone, closed by rank 0.

Megatron's asynchronous save forks processes out of a process that has threads, CUDA and open
collectives, keeps a manager process that outlives a killed rank, and needs collectives in
training's own group to end a save. Here a rank's part is written by the thread that calls write(),
and only ModelSaver.plan() is collective.
"""

import copy
import functools
import inspect
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_HELP
from vapo_megatron.checkpoint.manifest import DigestedFile, FileFacts
from vapo_megatron.checkpoint.sizes import FILES_PER_RANK
from vapo_megatron.errors import BadInput
from vapo_megatron.files import sync
from vapo_megatron.megatron import training_state
from vapo_megatron.megatron.optimizer import optimizer_tensors
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.checkpoint_metadata import MetadataReader
from vapo_megatron.weights.torch_dist import LOAD_ERRORS, load_reason

_BACKEND = "torch_dist"
_VERSION = 1
_COMMON_FILE = "common.pt"


@dataclass
class PlannedSave:
    """This rank's part of a model's checkpoint, its tensors copied to host memory."""

    folder: Path
    writer: Any
    metadata: Any
    common: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of this rank's tensors, until they are written."""
        buckets = self.writer.write_buckets or ()
        return sum(tensor.nbytes for _, _, (_, tensors) in buckets for _, tensor in tensors)

    def write(self) -> tuple[list[Any], dict[str, FileFacts]]:
        """Write this rank's tensors; no communication. Returns what rank 0 needs to close the
        checkpoint, and the contents of each file in the folder. Raises OSError where the file
        system refuses."""
        results: list[Any] = []
        facts: dict[str, FileFacts] = {}
        for path, key, (data, tensors) in self.writer.write_buckets or ():
            with DigestedFile(Path(path)) as file:
                into: Any = file
                for item, content in (*data, *tensors):
                    written = _write_item(
                        self.writer.transforms,
                        into,
                        content,
                        item,
                        key,
                        SerializationFormat.TORCH_SAVE,
                    )
                    results.append(written)
                facts[Path(path).name] = file.finish()
        self.writer.write_buckets = None  # the copies may go
        return results, facts

    def close(self, results: Sequence[list[Any]]) -> list[Path]:
        """On rank 0, once every rank has written: the files that make a checkpoint of it. Raises
        OSError."""
        common = self.folder / _COMMON_FILE
        torch.save(self.common, common)
        sync(common)
        self.writer.finish(self.metadata, list(results))
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self.folder))
        sync(self.folder / CONFIG_FNAME)
        return [
            common,
            *(path for path in self.folder.iterdir() if path.name in (".metadata", CONFIG_FNAME)),
        ]


_KNOWS_SAVERS = (
    "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
)


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point where bytes would be written to disk."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *_: Any, **__: Any) -> Any:
        """Same as Megatron's, which from 0.19 on would otherwise require the package of another
        saver."""
        if _KNOWS_SAVERS:
            ours = {"async_strategy": "mcore"}
        else:
            ours = {}
        return super().async_save(sharded_state_dict, checkpoint_dir, **ours)

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_checkpoint_dict_ret: Any, *_: Any
    ) -> Any:
        return writer, save_checkpoint_dict_ret[1]


class ModelSaver:
    """Plans the saves of one model, one after the other. While no rank's tensors change their
    names, shapes or places, it is agreed once who writes what. Plans are gathered in the first two
    saves, the second to see that they are the same; from the third on none is."""

    def __init__(self, trainable: Trainable) -> None:
        self._trainable = trainable
        self._parts: list[ShardedBase] = []
        self._planner: _PlanningStrategy | None = None
        self._strategy: Any = None

    def plan(self, folder: Path) -> PlannedSave:
        """Collective: agree on who writes what of the model's training state, and copy this rank's
        part to the host. Data-parallel copies share the writing. Training may continue when this
        returns."""
        # Megatron would start a manager process for results; here they stay in this process.
        filesystem_async._results_queue = queue.SimpleQueue()
        state = training_state.training_state(self._trainable)
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = [part.without_data() for part in nested_values(sharded)]
        if not self._is_as_before(parts):
            validate_sharding_integrity(
                determine_global_metadata(sharded)[1], common_state_dict=common
            )
            self._planner = _PlanningStrategy(
                _BACKEND, _VERSION, thread_count=FILES_PER_RANK, cached_metadata=True
            )
            self._strategy = self._planner
            ranks = self._trainable.mesh.pg.dp_cp
            if ranks.size() > 1:
                self._strategy = FullyParallelSaveStrategyWrapper(
                    self._planner, ranks, do_cache_distribution=True
                )
        self._parts = parts
        writer, metadata = self._strategy.async_save(sharded, folder)
        live = {tensor.untyped_storage().data_ptr() for tensor in _live_tensors(self._trainable)}
        writer.write_buckets = [
            (path, name, (data, [(item, _copied(tensor, live)) for item, tensor in tensors]))
            for path, name, (data, tensors) in writer.write_buckets or ()
        ]
        # Closing a checkpoint adds its files to the metadata. Even a count of steps may be a tensor
        # of the optimizer's.
        return PlannedSave(folder, writer, copy.copy(metadata), copy.deepcopy(common))

    def _is_as_before(self, parts: list[ShardedBase]) -> bool:
        """Collective: whether every rank saves the same as last time, and all agree whether plans
        are known."""
        planned = self._planner is not None and self._planner.validated_cache_reuse
        flags = torch.tensor([parts == self._parts, planned, not planned], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        same, all_know, none_knows = flags.bool().tolist()
        return self._planner is not None and same and (all_know or none_knows)


def load_training_state(
    trainable: Trainable, folder: Path, fetch: Callable[[set[str]], None] | None = None
) -> None:
    """Collective: fill a prepared model, its optimizer and its schedule from its folder in a
    checkpoint, saved at whatever layout. Raises BadInput where that does not fit the model, or
    cannot be read.

    fetch: called on all ranks together, each time with the files of the folder that this one reads
        next.
    """
    if not (folder / _COMMON_FILE).is_file():
        raise BadInput(
            f"{folder / _COMMON_FILE}: no such file, as in checkpoints that Megatron-Core 0.19 "
            "writes by itself, or the copy is incomplete: resume from a checkpoint that a run saved"
        )
    strategy = _Strategy(_Reader(folder, fetch))
    with torch.no_grad():
        for chunk in trainable.chunks if trainable.adapter is None else ():
            for parameter in chunk.parameters():
                # Rows of a vocabulary's padding are in no checkpoint of another layout.
                parameter.zero_()

    def load(state: dict[str, Any]) -> dict[str, Any]:
        ranks = trainable.mesh.pg.dp_cp
        if ranks.size() > 1:
            shared = FullyParallelLoadStrategyWrapper(strategy, ranks)
        else:
            shared = strategy
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), shared)
        return loaded

    try:
        training_state.load_training_state(trainable, load)
    except LOAD_ERRORS as error:
        raise BadInput(
            f"{folder}: does not fit this model, or is damaged ({load_reason(error)}): resume with "
            f"the config it was saved with; if that is so, {CHECKPOINT_HELP}"
        ) from None


def _live_tensors(trainable: Trainable) -> list[torch.Tensor]:
    """Tensors that training changes in place."""
    tensors = [
        parameter
        for chunk in trainable.chunks
        for parameter in (*chunk.parameters(), *chunk.buffers())
    ]
    if trainable.optimizer is None:
        return tensors
    return [*tensors, *optimizer_tensors(trainable.optimizer)]


def _copied(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    """The tensor in host memory, where training does not change it."""
    on_host = tensor.detach().to("cpu")
    if on_host.untyped_storage().data_ptr() in live:
        return on_host.clone()
    return on_host


class _Reader(MetadataReader):
    """Our reader, but it reads the metadata once and first has the files fetched that this rank
    reads next."""

    def __init__(self, folder: Path, fetch: Callable[[set[str]], None] | None) -> None:
        super().__init__(folder)
        self.read_metadata = functools.cache(super().read_metadata)  # type: ignore[method-assign]
        self._fetch = fetch

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Same as torch's, after fetching the files."""
        if self._fetch is not None:
            self._fetch(
                {self.storage_data[item.storage_index].relative_path for item in plan.items}
            )
        return super().read_data(plan, planner)


class _Strategy(torch_strategies.TorchDistLoadShardedStrategy):
    """Megatron's strategy, with one reader of ours for everything that is loaded from a folder."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, *arguments: Any) -> Any:
        """Same as Megatron's (with three arguments from 0.17 on), but with this reader."""
        theirs = torch_strategies._get_filesystem_reader
        torch_strategies._get_filesystem_reader = lambda *_, **__: self._reader
        try:
            return super().load(*arguments)
        finally:
            torch_strategies._get_filesystem_reader = theirs
