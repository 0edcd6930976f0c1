"""Megatron shards as whole Hugging Face tensors, in a stream of bounded buckets.

The one way out of Megatron: checkpoint export, conversion and the weight sync to the engines all read this stream.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import Module, Parameter

from vapo_megatron.collectives import gather_values
from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.adapters import adapter_entries, adapters_by_weight, local_adapters
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, SharedSlots, batches
from vapo_megatron.weights.gather import (
    GatheringAssembler,
    ParamShard,
    PartTimes,
    ShardReader,
    lay_out_entries,
)
from vapo_megatron.weights.mapping import Entry, MeshView, entries, local_parameters
from vapo_megatron.weights.spec import Head, ModelSpec

BUCKET_BYTES = 512 << 20
# Shards are gathered in pieces of this part of a bucket, so that gathering needs little memory of its own.
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
) -> Iterator[Bucket]:
    """The model as (Hugging Face name, whole tensor) pairs, on every rank of this rank's model-parallel group: max(tp,
    ep) x pp ranks. Adapters are merged into the weights that they adapt.

    Collective over the model-parallel group, each of whose ranks iterates to the end; other groups need not. The order
    is the model's from input to output, whatever the layout; tied weights come once, padding rows of the vocabulary not
    at all, as in transformers' save_pretrained. Memory beyond the shards: two buckets, what is gathered included; a
    parameter larger than bucket_bytes is a bucket of its own, and is gathered beside it.

    Args:
        chunks, spec, mesh, head: this rank's part of a model, what it was built from, its layout and its head.
        bucket_bytes: bound on a bucket.
        slots: the two places where buckets are put in turn: a bucket's tensors are gone when the next but one is asked
            for. None: memory of this rank's own.
        times: gets the seconds of "gather" (collectives) and "convert" (copies into place).

    Yields:
        Buckets of contiguous tensors on the model's device. The parameters must not change until the stream has ended.

    Raises:
        RunFailed: no stage holds a parameter that the spec has, or one holds what it does not have.
    """
    local: dict[Entry, Parameter] = {}
    for entry, parameter in local_parameters(chunks, spec, head, mesh.tp_size):
        local.setdefault(entry, parameter)
    device = next(iter(local.values())).device
    source = ShardReader(local, adapters_by_weight(chunks), spec, mesh, device)
    slots = slots or DeviceSlots(device)
    yield from _stream(source, entries(spec, head), bucket_bytes, slots, times or PartTimes())


@torch.no_grad()
def stream_adapters(
    chunks: Sequence[Module], spec: ModelSpec, mesh: MeshView, config: AdapterConfig
) -> Iterator[Bucket]:
    """The adapters of a model under PEFT's names for them, without the prefix of its classes; else as stream_hf."""
    local = local_adapters(chunks, config.rank)
    device = next(iter(local.values())).device
    source = ShardReader(local, {}, spec, mesh, device)
    yield from _stream(source, adapter_entries(spec, config), BUCKET_BYTES, DeviceSlots(device), PartTimes())


def _stream(
    source: ShardReader, every: list[Entry], bucket_bytes: int, slots: DeviceSlots | SharedSlots, times: PartTimes
) -> Iterator[Bucket]:
    """every: the entries to stream, in order, those of all stages."""
    piece, spec = max(1, bucket_bytes // PIECES), source.spec
    assembler = GatheringAssembler(source, piece, times)
    # Two pieces are under way at most, each with the shards that this rank adds to it; the backend may still hold the
    # shards of a third, whose collective has ended, and parameters that tp does not split come once from each rank.
    limit = bucket_bytes - 2 * piece
    plan = list(batches(_owners(source, every), lambda shard: shard.nbytes, limit))
    sizes = [lay_out_entries(batch, spec)[1] for batch in plan]
    assembler.begin(plan[0], slots.take(0, sizes[0]))
    for i in range(1, len(plan) + 1):
        bucket = assembler.finish()
        if i < len(plan):
            assembler.begin(plan[i], slots.take(i, sizes[i]))
        yield bucket
        del bucket


def make_slots(device: torch.device) -> DeviceSlots | SharedSlots:
    """Two places for the buckets of a rank's streams, to be closed at the end. Without a GPU engines can map them."""
    return SharedSlots() if device.type == "cpu" else DeviceSlots(device)


def _owners(source: ShardReader, every: list[Entry]) -> list[ParamShard]:
    """Every entry with the first stage that holds it; the same on every rank."""
    local, spec, mesh = source.local, source.spec, source.mesh
    mine = {i: local[entry].dtype for i, entry in enumerate(every) if entry in local}
    if mesh.ep_size > 1:  # the experts of the other ranks of this stage too
        mine = {i: dtype for held in gather_values(mine, mesh.pg.ep) for i, dtype in held.items()}
    stages = gather_values(mine, mesh.pg.pp) if mesh.pp_size > 1 else [mine]
    shards = []
    for i, entry in enumerate(every):
        stage = next((stage for stage, held in enumerate(stages) if i in held), None)
        if stage is None:
            raise RunFailed(f"{entry.hf[0]}: no pipeline stage holds the Megatron parameter that it comes from")
        dtype = stages[stage][i]
        nbytes = entry.rule.count(spec) * dtype.itemsize
        shards.append(ParamShard(entry, stage, entry.owner(spec, mesh.ep_size), dtype, nbytes))
    return shards
