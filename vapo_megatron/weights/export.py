"""Megatron shards as whole Hugging Face tensors, in a stream of bounded buckets.

The one way out of Megatron: checkpoint export, conversion and the hand-over to the engines all read this stream.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.mapping import Entry, MeshView, entries, local_parameters
from vapo_megatron.weights.spec import Head, ModelSpec

BUCKET_BYTES = 512 << 20
# A bucket is gathered in pieces of this part of it, so that gathering needs little memory of its own.
PIECES = 8


@dataclass(frozen=True)
class _Owned:
    """An entry, the pipeline stage that holds it, its parameters' dtype and its size as Hugging Face tensors."""

    entry: Entry
    stage: int
    dtype: torch.dtype
    nbytes: int


@torch.no_grad()
def stream_hf(
    chunks: Sequence[Module],
    spec: ModelSpec,
    mesh: MeshView,
    head: Head,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """The model as (Hugging Face name, whole tensor) pairs, on every rank of this rank's tp x pp block.

    Collective over the block's tensor- and pipeline-parallel groups: each of its ranks iterates to the end. Other
    replicas need not. The order is the model's from input to output, whatever the layout; tied weights come once,
    padding rows of the vocabulary not at all, as transformers' save_pretrained does.

    Memory beyond the shards: the bucket in use, the next one, and the shards of what is being gathered (an eighth of a
    bucket, or one parameter where that is larger). A parameter larger than a bucket is a bucket of its own.

    Args:
        chunks: this rank's, also wrapped in DistributedDataParallel.
        spec: what they were built from.
        mesh: their layout.
        head: their head.
        bucket_bytes: bound on a bucket, in bytes.
        dtype: of the tensors; None leaves each as it is.

    Yields:
        Buckets of contiguous tensors on the model's device. They may share storage with the parameters: to be read,
        or copied, before the parameters change.

    Raises:
        RunFailed: no stage holds a parameter that the spec has, or one holds what it does not have.
    """
    local: dict[Entry, Parameter] = {}
    for entry, parameter in local_parameters(chunks, spec, head, mesh.tp_size):
        local.setdefault(entry, parameter)
    device = next(iter(local.values())).device
    for bucket in _batches(_owners(local, spec, mesh, head, dtype), bucket_bytes):
        tensors: list[tuple[str, Tensor]] = []
        for piece in _pieces(bucket, bucket_bytes // PIECES):
            tensors += _gather(piece, local, spec, mesh, dtype, device)
        yield tensors


def _owners(
    local: dict[Entry, Parameter], spec: ModelSpec, mesh: MeshView, head: Head, dtype: torch.dtype | None
) -> list[_Owned]:
    """Every entry of the model with the first stage that holds it; the same on every rank."""
    every = entries(spec, head)
    mine = {i: local[entry].dtype for i, entry in enumerate(every) if entry in local}
    stages: list[dict[int, torch.dtype]] = [mine]
    if mesh.pp_size > 1:
        stages = [{}] * mesh.pp_size
        dist.all_gather_object(stages, mine, group=mesh.pg.pp)
    owned = []
    for i, entry in enumerate(every):
        stage = next((stage for stage, held in enumerate(stages) if i in held), None)
        if stage is None:
            raise RunFailed(f"{entry.hf[0]}: no pipeline stage holds the Megatron parameter that it comes from")
        found = stages[stage][i]
        owned.append(_Owned(entry, stage, found, entry.rule.count(spec) * (dtype or found).itemsize))
    return owned


def _batches(owned: list[_Owned], limit: int) -> Iterator[list[_Owned]]:
    """Consecutive entries of together at most limit bytes, or one that is larger."""
    batch: list[_Owned] = []
    size = 0
    for one in owned:
        if batch and size + one.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.nbytes
    if batch:
        yield batch


def _pieces(bucket: list[_Owned], limit: int) -> Iterator[list[_Owned]]:
    """Like _batches, and all of one stage and one dtype: what a single collective can move."""
    start = 0
    for i in range(1, len(bucket) + 1):
        if i == len(bucket) or (bucket[i].stage, bucket[i].dtype) != (bucket[start].stage, bucket[start].dtype):
            yield from _batches(bucket[start:i], limit)
            start = i


def _gather(
    piece: list[_Owned],
    local: dict[Entry, Parameter],
    spec: ModelSpec,
    mesh: MeshView,
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors of a piece: one all-gather over tp on its stage, one broadcast over pp."""
    stage, target = piece[0].stage, dtype or piece[0].dtype
    rules = [(one.entry, one.entry.rule.shard_shape(spec, mesh.tp_size)) for one in piece]
    if mesh.tp_size == mesh.pp_size == 1:
        shards = [[local[entry].detach().to(target)] for entry, _ in rules]
        return _renamed([entry for entry, _ in rules], shards, spec)
    size = sum(math.prod(shape) for _, shape in rules)
    gathered = torch.empty(mesh.tp_size, size, dtype=target, device=device)
    if stage == mesh.pp_rank:
        flat = torch.cat([local[entry].detach().reshape(-1).to(target) for entry, _ in rules])
        if mesh.tp_size > 1:
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=mesh.pg.tp)
        else:
            gathered[0] = flat
        del flat
    if mesh.pp_size > 1:
        dist.broadcast(gathered, src=dist.get_global_rank(mesh.pg.pp, stage), group=mesh.pg.pp)
    shards, offset = [], 0
    for _, shape in rules:
        end = offset + math.prod(shape)
        shards.append([row[offset:end].view(shape) for row in gathered])
        offset = end
    whole = _renamed([entry for entry, _ in rules], shards, spec)
    # A tensor that is a view would keep the whole piece in memory.
    held = gathered.untyped_storage().data_ptr()
    return [(name, x.clone() if x.untyped_storage().data_ptr() == held else x) for name, x in whole]


def _renamed(entries_: list[Entry], shards: list[list[Tensor]], spec: ModelSpec) -> list[tuple[str, Tensor]]:
    pairs: list[tuple[str, Tensor]] = []
    for entry, parts in zip(entries_, shards, strict=True):
        pairs += zip(entry.hf, entry.rule.to_hf(parts, spec), strict=True)
    return pairs
