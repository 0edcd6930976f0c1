"""The files of a torch_dist checkpoint, part by part: written without holding a model, and read on
demand.

Format, reader and writer are torch.distributed.checkpoint's. Only the planning is done here,
because each tensor is made when its turn comes.

Megatron stacks layers that are alike: the parameters of all layers are one tensor with the layer as
first axis, and experts' parameters have the expert as second axis. Where layers have different
parameters (dense ones before those with experts), each has its own keys. Keys have the names of
Transformer Engine's fused layers on any kind of layer
(TransformerLayerSubmodules.sharded_state_dict_keys_map). tests/weights/test_saved_keys.py compares
this with the sharded_state_dict of live models.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.checkpoint_metadata import METADATA_FILE, MetadataReader
from vapo_megatron.weights.mapping import ADAPTER, LAYERS, Entry, fused_names

_EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class Place:
    """Part of a saved tensor: its key, indices on the axes that layers and experts are stacked
    along (none outside the layers), the part's shape without those axes, and the full shape of the
    tensor."""

    key: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of the part in the tensor."""
        return (*self.stacked, *(0 for _ in self.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the part with the stacked axes."""
        return (*(1 for _ in self.stacked), *self.shape)


def place_of(entry: Entry, spec: ModelSpec) -> Place:
    """Where an entry's parameter is, whole and unpadded."""
    shape = entry.rule.shard_shape(1)
    name = entry.rule.megatron
    if entry.layer is None:
        return Place(name, (), shape, shape)
    experts = () if entry.expert is None else (spec.num_experts,)
    expert = () if entry.expert is None else (entry.expert,)
    if ADAPTER in name:
        return Place(f"{LAYERS}{entry.layer}.{name}", expert, shape, (*experts, *shape))
    if entry.expert is not None:
        name = f"{_EXPERTS}experts.{name.removeprefix(_EXPERTS)}"
    else:
        fused = {separate: name for name, separate in fused_names(spec.layers[entry.layer]).items()}
        name = fused.get(name, name)
    if not spec.is_uniform:
        return Place(f"{LAYERS}{entry.layer}.{name}", expert, shape, (*experts, *shape))
    full = (spec.num_layers, *experts, *shape)
    return Place(LAYERS + name, (entry.layer, *expert), shape, full)


class _LazyPlanner(DefaultSavePlanner):
    """Makes a tensor when the writer asks for it."""

    def __init__(self, makers: Mapping[MetadataIndex, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._makers = makers

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._makers[write_item.index]().reshape(write_item.tensor_data.chunk.sizes)  # type: ignore[union-attr]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made on the CPU when it is written, and its place."""

    place: Place
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_parts(
    folder: Path, parts: Sequence[Sequence[LazyTensor]], common: dict[str, Any]
) -> None:
    """Write a checkpoint tensor by tensor, one file for each part. common: content of common.pt.
    Raises OSError, or RuntimeError from torch's own writer, where the file system refuses."""
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    plans, metadata = create_default_global_save_plan(
        [SavePlan([*map(_write_item, part)]) for part in parts]
    )
    plans = writer.prepare_global_plan(plans)
    results = []
    for plan, part in zip(plans, parts, strict=True):
        planner = _LazyPlanner({_index(tensor.place): tensor.make for tensor in part})
        results.append(writer.write_data(plan, planner).wait())
    torch.save(common, folder / "common.pt")
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _index(place: Place) -> MetadataIndex:
    return MetadataIndex(place.key, torch.Size(place.offsets))


def _write_item(tensor: LazyTensor) -> WriteItem:
    place = tensor.place
    return WriteItem(
        index=_index(place),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=torch.Size(place.offsets), sizes=torch.Size(place.sizes)
            ),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(place.full),
        ),
    )


class _IntoTensor(DefaultLoadPlanner):
    """Copies the part that is read into its place in one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class PartReader:
    """Reads the tensors of a torch_dist checkpoint saved at any layout. Opening reads only its
    metadata, without running code from that pickle. Raises BadInput where there is no such
    checkpoint, or a file is missing or shorter than the metadata says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = MetadataReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError:
            raise BadInput(
                f"{folder / METADATA_FILE}: no such file; {folder} is not a complete torch_dist "
                "checkpoint"
            ) from None
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
            AttributeError,
            ImportError,
            ValueError,
        ) as error:
            raise BadInput(
                f"{folder / METADATA_FILE}: truncated or no checkpoint's metadata "
                f"({reason_of(error)}); save or convert the model again"
            ) from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]] | None] = {}
        self._check_files(metadata.storage_data)

    def _check_files(self, storage: dict[MetadataIndex, _StorageInfo]) -> None:
        ends: dict[str, int] = {}
        for info in storage.values():
            ends[info.relative_path] = max(
                ends.get(info.relative_path, 0), info.offset + info.length
            )
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise BadInput(
                    f"{path}: no such file, but {METADATA_FILE} names it; copy the checkpoint again"
                )
            if (size := path.stat().st_size) < end:
                raise BadInput(
                    f"{path}: truncated, {size} bytes, expected {end}; copy the checkpoint again"
                )

    def dtype(self, key: str) -> torch.dtype:
        """dtype of a key's tensor."""
        return self.tensors[key].properties.dtype

    def read(self, place: Place) -> Tensor:
        """Part of a tensor without its stacked axes, on the CPU, in its saved dtype. Raises
        BadInput where it is incomplete or its file is damaged."""
        chunk = ChunkStorageMetadata(
            offsets=torch.Size(place.offsets), sizes=torch.Size(place.sizes)
        )
        items = create_read_items_for_chunk_list(place.key, self._near(place), [chunk])
        if sum(item.lengths.numel() for item in items) != chunk.sizes.numel():
            raise BadInput(
                f"{self.folder}: key {place.key} is not there in full; save or convert the model "
                "again"
            )
        target = torch.empty(place.sizes, dtype=self.dtype(place.key))
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise BadInput(
                f"{self.folder}: key {place.key}: damaged ({reason}); copy the checkpoint again"
            ) from None
        return target.view(place.shape)

    def _near(self, place: Place) -> TensorStorageMetadata:
        """The tensor's metadata with only the chunks at the place's stacked indices; experts have
        thousands."""
        whole = self.tensors[place.key]
        stacked = len(place.stacked)
        if place.key not in self._chunks:
            groups: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in whole.chunks:
                groups.setdefault(tuple(chunk.offsets[:stacked]), []).append(chunk)
            regular = all(tuple(chunk.sizes[:stacked]) == (1,) * stacked for chunk in whole.chunks)
            self._chunks[place.key] = groups if regular else None
        near = self._chunks[place.key]
        return whole if near is None else replace(whole, chunks=near.get(place.stacked, []))
