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
    source: ShardReader, batch: list[ParamShard], memory: Memory, piece_bytes: int, times: PartTimes
) -> Bucket:
    """Fill memory with the whole tensors of a batch. Collective over the model-parallel group:
    every rank gets every shard and arranges them in private memory. A piece of the bucket
    travels at once: over tp by all-gather (experts by broadcast from the one rank of ep that holds
    them) within its stage, then over pp by broadcast."""
    bucket = Bucket(memory, *lay_out_entries(batch))
    tensors = dict(bucket)
    for piece in _pieces(batch, piece_bytes):
        with times.part("gather", source.device):
            gathered = _gather(source, piece)
        with times.part("convert", source.device):
            offset = 0
            for param in piece:
                shape = param.entry.rule.shard_shape(source.mesh.tp_size)
                wholes = [param.entry.part(tensors[name]) for name in param.entry.hf]
                end = offset + math.prod(shape)
                for rank, row in enumerate(gathered):
                    param.entry.rule.place(row[offset:end].view(shape), wholes, rank, len(gathered))
                offset = end
    return bucket


def _gather(source: ShardReader, piece: list[ParamShard]) -> Tensor:
    """The shards of a piece, one after another: [ranks that hold one, elements]."""
    mesh = source.mesh
    first = piece[0]
    size = sum(math.prod(shard.entry.rule.shard_shape(mesh.tp_size)) for shard in piece)
    holders = mesh.tp_size if first.expert_rank is None else 1
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


def _pieces(bucket: list[ParamShard], limit: int) -> Iterator[list[ParamShard]]:
    """As batches, but each of one dtype and held by the same ranks, so that one collective can move
    it."""
    for _, alike in itertools.groupby(
        bucket, key=lambda shard: (shard.stage, shard.expert_rank, shard.dtype)
    ):
        yield from batches(alike, lambda shard: shard.nbytes, limit)
