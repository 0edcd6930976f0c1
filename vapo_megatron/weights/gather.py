"""Shards of a model-parallel group's ranks become buckets of whole Hugging Face tensors, gathered in pieces."""

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

from vapo_megatron.weights.adapters import Adapter
from vapo_megatron.weights.bucket import Bucket, Memory, Place, batches, lay_out
from vapo_megatron.weights.mapping import Entry, MeshView
from vapo_megatron.weights.spec import ModelSpec


class PartTimes:
    """Seconds by part. On a GPU what a part enqueues on its stream is timed, and read only when asked for."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Add what happens inside to a part; on a CUDA device its current stream's time, else wall-clock time."""
        if device is None or device.type != "cuda":
            start = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, time.perf_counter() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by part so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1e3)
        self._events.clear()
        return dict(self._seconds)


@dataclass(frozen=True)
class ParamShard:
    """An entry, the pipeline stage and expert-parallel rank that hold it, its dtype and bytes."""

    entry: Entry
    stage: int
    expert_rank: int | None
    dtype: torch.dtype
    nbytes: int


def lay_out_entries(batch: list[ParamShard], spec: ModelSpec) -> tuple[list[Place], int]:
    """Places for all Hugging Face tensors of some entries, and the bytes they take."""
    return lay_out(
        (name, shard.dtype, shape)
        for shard in batch
        for name, shape in zip(shard.entry.hf, shard.entry.rule.hf_shapes(spec), strict=True)
    )


def model_parallel_group(mesh: MeshView) -> Any:
    """The group of the ranks that together hold the model; None where it is this rank alone."""
    if max(mesh.tp_size, mesh.ep_size) * mesh.pp_size == 1:
        return None
    return mesh.pg.tp_ep_pp if mesh.ep_size > mesh.tp_size else mesh.pg.mp


@dataclass(frozen=True)
class ShardReader:
    """What an assembler reads: this rank's parameters and their adapters, and their layout over ranks."""

    local: Mapping[Entry, Parameter]
    adapters: Mapping[Parameter, Adapter]
    spec: ModelSpec
    mesh: MeshView
    device: torch.device

    def shard(self, entry: Entry) -> Tensor:
        """This rank's shard of an entry; of an adapted one the sum with its adapter."""
        parameter, adapter = self.local[entry].detach(), self.adapters.get(self.local[entry])
        return parameter if adapter is None else adapter.merged(parameter)

    @property
    def group(self) -> Any:
        """Of the ranks that together hold the model; None where it is this rank alone."""
        return model_parallel_group(self.mesh)


class GatheringAssembler:
    """Fills one bucket after another. Collective over the model-parallel group, from each rank's main thread: every
    rank gets every shard and arranges them in memory of its own.

    A piece of a bucket travels at once: over tp by all-gather (experts by broadcast from the one rank of ep that holds
    them) within its stage, then over pp by broadcast. On a GPU all of it is enqueued on a stream beside the current one
    when the bucket is begun; on a CPU one piece is under way while the one before is arranged, or the last bucket in
    use.
    """

    def __init__(self, source: ShardReader, piece_bytes: int, times: PartTimes) -> None:
        self._source, self._piece_bytes, self._times = source, piece_bytes, times
        self._stream = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None
        self._bucket: Bucket | None = None
        self._pieces: Iterator[list[ParamShard]] = iter(())
        self._flying: _Flight | None = None

    def begin(self, batch: list[ParamShard], memory: Memory) -> None:
        """Start to fill memory with the tensors of a batch."""
        self._bucket = Bucket(memory, *lay_out_entries(batch, self._source.spec))
        self._pieces = _pieces(batch, self._piece_bytes)
        self._tensors = iter(self._bucket)
        if self._stream is None:
            self._flying = self._launch(next(self._pieces), wait=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        # Should nobody ask for the end of the stream, the memory is not given away before this is done.
        memory.buffer.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            for piece in self._pieces:
                self._arrange(self._launch(piece, wait=True))

    def finish(self) -> Bucket:
        """The bucket begun last, whole. Every rank of the group is done with the one before when this returns."""
        assert self._bucket is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        while self._flying is not None:
            following = next(self._pieces, None)
            flying, self._flying = self._flying, None if following is None else self._launch(following, wait=False)
            self._arrange(flying)
            del flying
        bucket, self._bucket = self._bucket, None
        return bucket

    @torch.no_grad()
    def _launch(self, piece: list[ParamShard], wait: bool) -> "_Flight":
        """Start the first collective of a piece; with `wait` later work on this stream waits for it."""
        source, mesh = self._source, self._source.mesh
        first = piece[0]
        shapes = [shard.entry.rule.shard_shape(source.spec, mesh.tp_size) for shard in piece]
        size = sum(math.prod(shape) for shape in shapes)
        holders = mesh.tp_size if first.expert_rank is None else 1
        gathered = torch.empty(holders, size, dtype=first.dtype, device=source.device)
        work = None
        if first.stage == mesh.pp_rank:
            mine = [source.shard(shard.entry).reshape(-1) for shard in piece if shard.entry in source.local]
            with self._times.part("gather", source.device):
                if first.expert_rank is not None:
                    if mesh.ep_rank == first.expert_rank:
                        torch.cat(mine, out=gathered[0])
                    if mesh.ep_size > 1:
                        owner = dist.get_global_rank(mesh.pg.ep, first.expert_rank)
                        work = dist.broadcast(gathered, src=owner, group=mesh.pg.ep, async_op=not wait)
                elif mesh.tp_size > 1:
                    flat = gathered.new_empty(size)
                    torch.cat(mine, out=flat)
                    work = dist.all_gather_into_tensor(gathered.view(-1), flat, group=mesh.pg.tp, async_op=not wait)
                else:
                    torch.cat(mine, out=gathered[0])
        return _Flight(piece, shapes, gathered, work)

    @torch.no_grad()
    def _arrange(self, flight: "_Flight") -> None:
        source, mesh = self._source, self._source.mesh
        with self._times.part("gather", source.device):
            if flight.work is not None:
                flight.work.wait()
            if mesh.pp_size > 1:
                stage = dist.get_global_rank(mesh.pg.pp, flight.piece[0].stage)
                dist.broadcast(flight.gathered, src=stage, group=mesh.pg.pp)
        offset = 0
        with self._times.part("convert", source.device):
            for param, shape in zip(flight.piece, flight.shapes, strict=True):
                wholes = [tensor for _, tensor in itertools.islice(self._tensors, len(param.entry.hf))]
                end = offset + math.prod(shape)
                for rank, row in enumerate(flight.gathered):
                    shard = row[offset:end].view(shape)
                    param.entry.rule.place(shard, wholes, source.spec, rank, len(flight.gathered))
                offset = end


@dataclass
class _Flight:
    """A piece on its way: gathered is [ranks that hold a shard, elements]."""

    piece: list[ParamShard]
    shapes: list[tuple[int, ...]]
    gathered: Tensor
    work: Any


def _pieces(bucket: list[ParamShard], limit: int) -> Iterator[list[ParamShard]]:
    """Like batches, and all of one dtype and held by the same ranks: what a single collective can move."""
    for _, alike in itertools.groupby(bucket, key=lambda shard: (shard.stage, shard.expert_rank, shard.dtype)):
        yield from batches(alike, lambda shard: shard.nbytes, limit)
