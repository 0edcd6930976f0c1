"""Gathers the shards of a model-parallel group, in pieces, into buckets of whole Hugging Face
tensors."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.bucket import Bucket, Memory, Place, batches, lay_out
from vapo_megatron.weights.mapping import Entry, MeshView


class PartTimes:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Add the seconds of the body to a part; on a CUDA device, until its current stream is
        done."""
        start = time.perf_counter()
        yield
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True)
class ParamShard:
    """An entry, the pipeline stage and expert-parallel rank that hold it, its dtype and bytes."""

    entry: Entry
    stage: int
    expert_rank: int | None
    dtype: torch.dtype
    nbytes: int


def lay_out_entries(batch: list[ParamShard]) -> tuple[list[Place], int]:
    """Places for all Hugging Face tensors of some entries, and the bytes they take."""
    tensors = {
        name: (name, shard.dtype, shape)  # once, where several experts' entries fill it
        for shard in batch
        for name, shape in zip(shard.entry.hf, shard.entry.rule.file_shapes(), strict=True)
    }
    return lay_out(tensors.values())


@dataclass(frozen=True)
class ShardReader:
    """The source of a stream: this rank's parameters, their adapters, and the layout over ranks."""

    local: Mapping[Entry, Parameter]
    adapters: Mapping[Entry, Any]
    spec: ModelSpec
    mesh: MeshView
    device: torch.device

    def shard(self, entry: Entry) -> Tensor:
        """This rank's shard of an entry, with its adapter merged if it has one."""
        parameter = self.local[entry].detach()
        adapter = self.adapters.get(entry)
        return parameter if adapter is None else adapter.merged(parameter)


def assemble(
    source: ShardReader,
    batch: list[ParamShard],
    memory: Memory,
    piece_bytes: int,
    times: PartTimes,
    own_shares: bool = False,
) -> Bucket:
    """Fill memory with the whole tensors of a batch. Collective over the model-parallel group:
    every rank gets every shard and arranges them in private memory. A piece of the bucket
    travels at once: over tp by all-gather (experts by broadcast from the one rank of ep that holds
    them) within its stage, then over pp by broadcast.

    own_shares: nothing travels over tp. A rank gets its own shares alone, of all stages, and
        experts whole.
    """
    bucket = Bucket(memory, *lay_out_entries(batch), own_shares)
    tensors = dict(bucket)
    holders = 1 if own_shares else source.mesh.tp_size
    for piece in _pieces(batch, piece_bytes, source.mesh.tp_size, holders):
        with times.part("gather", source.device):
            gathered = _gather(source, piece, own_shares)
        with times.part("convert", source.device):
            offset = 0
            for param in piece:
                shape = param.entry.rule.shard_shape(source.mesh.tp_size)
                wholes = [param.entry.part(tensors[name]) for name in param.entry.hf]
                end = offset + math.prod(shape)
                places = _places(source, param, own_shares)
                for row, place in zip(gathered, places, strict=True):
                    param.entry.rule.place(row[offset:end].view(shape), wholes, *place)
                offset = end
    return bucket


# Floats of any type whose bytes are all this are neither zero nor NaN.
_MASK_BYTE = 0x3F


def mask_own_shares(source: ShardReader, batch: list[ParamShard], memory: Memory) -> Bucket:
    """Fill memory with a mask of what assemble() fills with own_shares: zeros, and numbers above
    zero where it puts weights."""
    bucket = Bucket(memory, *lay_out_entries(batch), own_shares=True)
    bucket.buffer.zero_()
    tensors = dict(bucket)
    for param in batch:
        one = torch.full((param.dtype.itemsize,), _MASK_BYTE, dtype=torch.uint8)
        shape = param.entry.rule.shard_shape(source.mesh.tp_size)
        shard = one.view(param.dtype).to(source.device).expand(shape)
        wholes = [param.entry.part(tensors[name]) for name in param.entry.hf]
        for place in _places(source, param, own_shares=True):
            param.entry.rule.place(shard, wholes, *place)
    return bucket


def _places(source: ShardReader, param: ParamShard, own_shares: bool) -> list[tuple[int, int]]:
    """Whose shards a rank places, in order: each tensor-parallel rank, and how many there are."""
    mesh = source.mesh
    if param.expert_rank is not None:
        return [(0, 1)]
    if not own_shares:
        return [(rank, mesh.tp_size) for rank in range(mesh.tp_size)]
    # What all ranks have is placed as rank 0's
    return [(0 if param.entry.rule.cut is None else mesh.tp_rank, mesh.tp_size)]


def _gather(source: ShardReader, piece: list[ParamShard], own_shares: bool) -> Tensor:
    """The shards of a piece, one after another: [ranks whose shards are placed, elements]."""
    mesh = source.mesh
    first = piece[0]
    size = sum(math.prod(shard.entry.rule.shard_shape(mesh.tp_size)) for shard in piece)
    holders = len(_places(source, first, own_shares))
    gathered = torch.empty(holders, size, dtype=first.dtype, device=source.device)
    if first.stage == mesh.pp_rank:
        mine = [
            source.shard(shard.entry).reshape(-1) for shard in piece if shard.entry in source.local
        ]
        flat = gathered[0] if holders == 1 else gathered.new_empty(size)
        if mine:
            torch.cat(mine, out=flat)
        if holders > 1:
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=mesh.pg.tp)
        elif first.expert_rank is not None and mesh.ep_size > 1:
            owner = dist.get_global_rank(mesh.pg.ep, first.expert_rank)
            dist.broadcast(gathered, src=owner, group=mesh.pg.ep)
    if mesh.pp_size > 1:
        dist.broadcast(
            gathered, src=dist.get_global_rank(mesh.pg.pp, first.stage), group=mesh.pg.pp
        )
    return gathered


def _pieces(
    bucket: list[ParamShard], limit: int, tp_size: int, holders: int
) -> Iterator[list[ParamShard]]:
    """As batches, but each of one dtype and held by the same ranks, so that one collective can move
    it. holders: tensor-parallel ranks whose shards travel together."""

    def nbytes(shard: ParamShard) -> int:
        count = math.prod(shard.entry.rule.shard_shape(tp_size))
        ranks = holders if shard.expert_rank is None else 1
        return ranks * count * shard.dtype.itemsize

    for _, alike in itertools.groupby(
        bucket, key=lambda shard: (shard.stage, shard.expert_rank, shard.dtype)
    ):
        yield from batches(alike, nbytes, limit)
