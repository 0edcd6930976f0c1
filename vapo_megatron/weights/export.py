"""Streams Megatron shards as whole Hugging Face tensors, in bounded buckets, and writes them to
directories.

Everything that leaves a live model goes through this stream: exports, which transformers and PEFT
load, and the weight sync.
"""

import itertools
import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import (
    PEFT_CONFIG,
    adapter_entries,
    adapters_of,
    local_adapters,
    write_peft,
)
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, SharedSlots, batches
from vapo_megatron.weights.carried import carried_of, export_form
from vapo_megatron.weights.gather import (
    ParamShard,
    PartTimes,
    ShardReader,
    assemble,
    lay_out_entries,
    mask_own_shares,
)
from vapo_megatron.weights.hf_writer import (
    MAX_SHARD_BYTES,
    add_carried,
    carried_files,
    check_replaceable,
    exported_config,
    hf_writer,
    new_directory,
)
from vapo_megatron.weights.mapping import (
    Entry,
    MeshView,
    by_tensors,
    entries,
    local_parameters,
)

_logger = logging.getLogger(__name__)
BUCKET_BYTES = 512 << 20
# Shards are gathered in pieces of this part of a bucket, so that gathering needs little memory of
# its own.
PIECES = 16


@torch.no_grad()
def stream_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    bucket_bytes: int = BUCKET_BYTES,
    slots: DeviceSlots | SharedSlots | None = None,
    times: PartTimes | None = None,
    own_shares: Collection[int] = (),
) -> Iterator[Bucket]:
    """The model as (Hugging Face name, whole tensor) pairs, on every rank of this rank's
    model-parallel group: max(tp, ep) x pp ranks. Adapters are merged into the weights that they
    adapt.

    Collective over the model-parallel group, each of whose ranks iterates to the end; other groups
    need not. The order is the model's from input to output, whatever the layout; tied weights come
    once, padding rows of the vocabulary not at all, as in transformers' save_pretrained. Memory
    beyond the shards: two buckets, gathered tensors included; a parameter larger than bucket_bytes
    is a separate bucket, and is gathered beside it.

    Args:
        chunks, spec, mesh, head: this rank's part of a model, its spec, its layout
            and its head.
        bucket_bytes: bound on a bucket.
        slots: the two places where buckets are put in turn: a bucket's tensors are gone when the
            next but one is requested. None: private memory of this rank.
        times: gets the seconds of "gather" (collectives) and "convert" (copies into place).
        own_shares: numbers of the buckets, counted from 0, that are not gathered over tp: a rank's
            has its own shares alone in their places (Bucket.own_shares). The same on all ranks.

    Yields:
        Buckets of contiguous tensors on the model's device. The parameters must not change until
        the stream has ended.

    Raises:
        RunFailed: no stage holds a parameter that the spec has, or one that the spec lacks.
    """
    source = _reader(chunks, spec, mesh, head)
    slots = slots or DeviceSlots(source.device)
    every = entries(spec, head)
    yield from _stream(source, every, bucket_bytes, slots, times or PartTimes(), own_shares)


@torch.no_grad()
def stream_masks(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    bucket_bytes: int,
    slots: DeviceSlots | SharedSlots,
) -> Iterator[Bucket]:
    """For each bucket of stream_hf() with these arguments, a mask of this rank's own shares, above
    zero where there are any. Collective as stream_hf()."""
    source = _reader(chunks, spec, mesh, head)
    for i, batch in enumerate(_batches(source, entries(spec, head), bucket_bytes)):
        yield mask_own_shares(source, batch, slots.take(i, lay_out_entries(batch)[1]))


def _reader(chunks: Sequence[Module], spec: ModelSpec, mesh: MeshView, head: Head) -> ShardReader:
    """This rank's part of a model as the source of a stream."""
    local: dict[Entry, Parameter] = {}
    for entry, parameter in local_parameters(chunks, spec, head, mesh.tp_size):
        local.setdefault(entry, parameter)
    device = next(iter(local.values())).device
    adapters = {adapter.adapts: adapter for chunk in chunks for _, adapter in adapters_of(chunk)}
    return ShardReader(local, adapters, spec, mesh, device)


@torch.no_grad()
def stream_adapters(
    chunks: Sequence[Module], spec: ModelSpec, mesh: MeshView, config: AdapterConfig
) -> Iterator[Bucket]:
    """The adapters of a model under PEFT's names without the prefix of its classes; otherwise as
    stream_hf."""
    local = local_adapters(chunks)
    device = next(iter(local.values())).device
    source = ShardReader(local, {}, spec, mesh, device)
    yield from _stream(
        source, adapter_entries(spec, config), BUCKET_BYTES, DeviceSlots(device), PartTimes()
    )


def _stream(
    source: ShardReader,
    every: list[Entry],
    bucket_bytes: int,
    slots: DeviceSlots | SharedSlots,
    times: PartTimes,
    own_shares: Collection[int] = (),
) -> Iterator[Bucket]:
    """every: the entries to stream, in order, of all stages."""
    piece = _piece_bytes(bucket_bytes)
    for i, batch in enumerate(_batches(source, every, bucket_bytes)):
        memory = slots.take(i, lay_out_entries(batch)[1])
        yield assemble(source, batch, memory, piece, times, i in own_shares)


def _piece_bytes(bucket_bytes: int) -> int:
    return max(1, bucket_bytes // PIECES)


def _batches(
    source: ShardReader, every: list[Entry], bucket_bytes: int
) -> Iterator[list[ParamShard]]:
    """Collective: the shards of each bucket, in order."""
    shards = dict(zip(every, _owners(source, every), strict=True))
    groups = [[shards[entry] for entry in group] for group in by_tensors(every)]

    def nbytes(group: list[ParamShard]) -> int:
        return sum(shard.nbytes for shard in group)

    # A piece is under way at most, with the shards that this rank adds to it.
    limit = bucket_bytes - 2 * _piece_bytes(bucket_bytes)
    for together in batches(groups, nbytes, limit):
        yield list(itertools.chain.from_iterable(together))


def make_slots(device: torch.device) -> DeviceSlots | SharedSlots:
    """Two buffers for a rank's streams, to be closed at the end. Without a GPU, engines can map
    them."""
    return SharedSlots() if device.type == "cpu" else DeviceSlots(device)


def _owners(source: ShardReader, every: list[Entry]) -> list[ParamShard]:
    """Every entry with the first stage that holds it, the same on every rank."""
    local = source.local
    spec = source.spec
    mesh = source.mesh
    mine = {i: local[entry].dtype for i, entry in enumerate(every) if entry in local}
    if mesh.ep_size > 1:  # the experts of the other ranks of this stage too
        mine = {i: dtype for held in gather_values(mine, mesh.pg.ep) for i, dtype in held.items()}
    stages = gather_values(mine, mesh.pg.pp) if mesh.pp_size > 1 else [mine]
    shards = []
    for i, entry in enumerate(every):
        stage = next((stage for stage, held in enumerate(stages) if i in held), None)
        if stage is None:
            raise RunFailed(
                f"{entry.hf[0]}: no pipeline stage holds the Megatron parameter that it comes from"
            )
        dtype = stages[stage][i]
        nbytes = entry.rule.count() * dtype.itemsize
        shards.append(ParamShard(entry, stage, entry.owner(spec, mesh.ep_size), dtype, nbytes))
    return shards


def save_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    source_dir: Path,
    out_dir: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model; collective over all ranks. Global rank 0 writes, its block (stream_hf)
    streams, the others wait.

    A language model becomes ...ForCausalLM, a value model ...ForTokenClassification with a label
    for each output of its head (score.weight [labels, hidden], score.bias [labels]). config.json,
    tokenizer, chat template and (of a language model) generation config come from source_dir,
    the directory that the model came from. out_dir appears whole, in place of a model that is
    there, or not at all. max_shard_bytes bounds a file, and what rank 0 holds in memory.

    Raises BadInput: on every rank, where source_dir has no config.json or the file system refuses.
    """
    stream = stream_hf(chunks, spec, mesh, head) if mesh.in_first_model_parallel_group else iter(())

    def write() -> None:
        try:
            dtype = next(chunks[0].parameters()).dtype
            carried = carried_of(source_dir, spec)
            form = export_form(read_config(source_dir), carried, spec, head)
            if form.left_out:
                _logger.warning("%s: %s", out_dir, form.left_out)
            config = exported_config(form, spec, head, dtype)
            with hf_writer(
                out_dir, config, source_dir, carried_files(head), max_shard_bytes
            ) as writer:
                for name, tensor in itertools.chain.from_iterable(stream):
                    writer.add(form.name(name), tensor)
                for name, shape in spec.empty_tensors().items():
                    writer.add(name, torch.empty(shape, dtype=dtype))
                add_carried(writer, form)
        finally:
            deque(stream, maxlen=0)  # the other ranks are in the stream's collectives

    if dist.get_rank() > 0:
        deque(stream, maxlen=0)
    on_rank_zero(write)


def adapter_folder(exported: Path) -> Path:
    """The directory for the adapters of an exported model, beside the merged weights."""
    return exported.with_name(f"{exported.name}_adapter")


def save_adapters(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    config: AdapterConfig,
    source_dir: Path,
    out_dir: Path,
) -> None:
    """Write a language model's adapters in the form that PEFT's PeftModel.from_pretrained reads;
    collective as save_hf. adapter_config.json names source_dir as the base model. Raises BadInput
    where the file system refuses."""
    tensors: dict[str, Tensor] = {}
    for bucket in (
        stream_adapters(chunks, spec, mesh, config) if mesh.in_first_model_parallel_group else ()
    ):
        if dist.get_rank() == 0:
            tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}

    def write() -> None:
        check_replaceable(out_dir, PEFT_CONFIG)
        with new_directory(out_dir) as folder:
            write_peft(folder, tensors, config, spec, "lm", str(source_dir))

    on_rank_zero(write)
