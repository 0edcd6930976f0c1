"""How one Megatron parameter is made of Hugging Face tensors, and these again of its tensor-parallel shards.

A rule is both directions of one correspondence. It is pure: tensors in, tensors out; which rank owns what and how
shards travel is not its business.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from vapo_megatron.weights.spec import ModelSpec

Dimension = int | str
"""A size, or the name of the ModelSpec attribute that gives it."""


Placing = tuple[Tensor, Tensor]
"""Part of a Hugging Face tensor, and the part of a shard that goes there, as views of equal shape."""


class SliceableTensor(Protocol):
    """A Hugging Face tensor of which parts can be taken: a torch.Tensor, or one that still lies in a file."""

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True)
class Rule(ABC):
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Attributes:
        megatron: the parameter's name under local (not fused) layers, within its layer for a rule of a layer.
        hf: names of the Hugging Face tensors; "{layer}" and "{expert}" stand for the indices of layer and expert.
        shape: of each of them, dimension by dimension (of QKV: without the first).
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[Dimension, ...]

    def parts(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        """Shapes of the matrices or vectors that it puts together, each a Hugging Face tensor where none is fused."""
        return [_sizes(self.shape, spec)] * len(self.hf)

    def hf_shapes(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""
        return self.parts(spec)

    @abstractmethod
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        """Shape of a tensor-parallel rank's parameter."""

    @abstractmethod
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        """What a tensor-parallel rank holds; of each source only the rows or columns of this rank are read."""

    @abstractmethod
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        """The Hugging Face tensors, contiguous, in the order of `hf`, from the shards of all ranks in their order.

        With one shard they may share its storage.
        """

    @abstractmethod
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        """Where a rank's shard belongs in the Hugging Face tensors, which are contiguous, tensor by tensor.

        The shards of all ranks, each copied once and in any order, fill them; of a Replicated rule rank 0's does.
        """

    def place(self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> None:
        """Copy a rank's shard to where it belongs."""
        for target, source in self.placings(shard, wholes, spec, tp_rank, tp_size):
            target.copy_(source)

    def cast(self, asked: torch.dtype | None, held: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter held in `held` is written where `asked` is asked for (None: no other)."""
        return asked or held

    def count(self, spec: "ModelSpec") -> int:
        """Parameters of the Hugging Face tensors."""
        return sum(math.prod(shape) for shape in self.hf_shapes(spec))


@dataclass(frozen=True)
class Replicated(Rule):
    """Whole on every tensor-parallel rank: norms, the router, the value head."""

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        return _sizes(self.shape, spec)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        return sources[0][:]

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        return [shards[0].contiguous()]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        return [(wholes[0], shard)] if tp_rank == 0 else []


@dataclass(frozen=True)
class ExactVector(Replicated):
    """Numbers that small differences of make other choices: never cast."""

    @override
    def cast(self, asked: torch.dtype | None, held: torch.dtype) -> torch.dtype:
        return held


@dataclass(frozen=True)
class Row(Rule):
    """Cut along the input features, dimension 1 (Megatron's RowParallelLinear)."""

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        rows, columns = _sizes(self.shape, spec)
        return (rows, columns // tp_size)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        columns = self.shard_shape(spec, tp_size)[1]
        return sources[0][:, tp_rank * columns : (tp_rank + 1) * columns]

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        return [_joined(shards, dim=1)]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        return [(wholes[0].chunk(tp_size, dim=1)[tp_rank], shard)]


@dataclass(frozen=True)
class Vocabulary(Rule):
    """A row per word, cut along dimension 0; the table is padded with rows of zeros to a multiple of the ranks."""

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        _, *rest = _sizes(self.shape, spec)
        return (spec.vocab_shard_size(tp_size), *rest)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        words = _sizes(self.shape, spec)[0]
        rows = self.shard_shape(spec, tp_size)[0]
        first = min(tp_rank * rows, words)
        real = sources[0][first : min(first + rows, words)]
        if real.shape[0] == rows:
            return real
        return torch.cat((real, real.new_zeros(rows - real.shape[0], *real.shape[1:])))

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        words = _sizes(self.shape, spec)[0]
        parts, left = [], words
        for shard in shards:
            if left > 0:
                parts.append(shard[:left])
                left -= shard.shape[0]
        return [_joined(parts)]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        mine = wholes[0][tp_rank * shard.shape[0] : (tp_rank + 1) * shard.shape[0]]
        return [(mine, shard[: mine.shape[0]])]


@dataclass(frozen=True)
class GateUp(Rule):
    """The halves of a gated MLP, each cut along the output features; a rank holds its part of gate above that of up."""

    @override
    def parts(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        return [_sizes(self.shape, spec)] * 2

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        rows, *rest = _sizes(self.shape, spec)
        return (2 * (rows // tp_size), *rest)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        rows = self.shard_shape(spec, tp_size)[0] // 2
        mine = slice(tp_rank * rows, (tp_rank + 1) * rows)
        return torch.cat([source[mine] for source in sources])

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[i] for half in halves]) for i in range(2)]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        return [(whole.chunk(tp_size)[tp_rank], half) for whole, half in zip(wholes, shard.chunk(2), strict=True)]


@dataclass(frozen=True)
class ExpertGateUp(GateUp):
    """The two halves of an expert's gated MLP: whole, since experts are not cut over tensor-parallel ranks."""

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        return super().shard_shape(spec, 1)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        return super().to_shard(sources, spec, 0, 1)

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        return super().placings(shard, wholes, spec, 0, 1)


@dataclass(frozen=True)
class ExpertDown(Replicated):
    """The way back out of an expert's MLP: whole likewise, and placed by whichever rank holds the expert."""

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        return super().placings(shard, wholes, spec, 0, 1)


@dataclass(frozen=True)
class QKV(Rule):
    """Query, key and value projections, weights or biases, interleaved by key-value group.

    Megatron's linear_qkv holds, group after group, the group's queries, its key and its value (SelfAttention's
    get_query_key_value_tensors); a rank holds whole groups.
    """

    @override
    def parts(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        rest = _sizes(self.shape, spec)
        return [(spec.query_size, *rest), (spec.kv_size, *rest), (spec.kv_size, *rest)]

    @override
    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        return ((spec.query_size + 2 * spec.kv_size) // tp_size, *_sizes(self.shape, spec))

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        groups = spec.num_kv_heads // tp_size
        parts = []
        for source, shape in zip(sources, self.parts(spec), strict=True):
            rows = shape[0] // tp_size
            part = source[tp_rank * rows : (tp_rank + 1) * rows]
            parts.append(part.reshape(groups, rows // groups, *shape[1:]))
        return torch.cat(parts, dim=1).flatten(0, 1)

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        groups = spec.num_kv_heads // len(shards)
        heads = spec.num_heads // spec.num_kv_heads
        rows = [heads * spec.head_dim, spec.head_dim, spec.head_dim]
        split = [shard.unflatten(0, (groups, sum(rows))).split(rows, dim=1) for shard in shards]
        return [torch.cat([parts[i] for parts in split]).flatten(0, 1).contiguous() for i in range(3)]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        groups = spec.num_kv_heads // tp_size
        heads = spec.num_heads // spec.num_kv_heads
        rows = [heads * spec.head_dim, spec.head_dim, spec.head_dim]
        parts = shard.unflatten(0, (groups, sum(rows))).split(rows, dim=1)
        targets = (whole.chunk(tp_size)[tp_rank].unflatten(0, (groups, -1)) for whole in wholes)
        return list(zip(targets, parts, strict=True))


@dataclass(frozen=True)
class _Rows:
    """Some consecutive rows of a tensor, which need not be read yet."""

    whole: SliceableTensor
    start: int

    def __getitem__(self, rows: slice) -> Tensor:
        return self.whole[self.start + rows.start : self.start + rows.stop]


class _Fused(Rule):
    """A rule of several Hugging Face tensors, before which it is put, out of one that has them above each other."""

    @override
    def hf_shapes(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        parts = self.parts(spec)
        return [(sum(shape[0] for shape in parts), *parts[0][1:])]

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        rows = [shape[0] for shape in self.parts(spec)]
        parts = [_Rows(sources[0], end - count) for end, count in zip(accumulate(rows), rows, strict=True)]
        return super().to_shard(parts, spec, tp_rank, tp_size)  # type: ignore[safe-super]

    @override
    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        return [torch.cat(super().to_hf(shards, spec))]  # type: ignore[safe-super]

    @override
    def placings(
        self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int
    ) -> list[Placing]:
        parts = wholes[0].split([shape[0] for shape in self.parts(spec)])
        return super().placings(shard, parts, spec, tp_rank, tp_size)  # type: ignore[safe-super]


class FusedQKV(_Fused, QKV):
    """Query, key and value projections in one tensor."""


class FusedGateUp(_Fused, GateUp):
    """The halves of a gated MLP in one tensor."""


def _sizes(shape: tuple[Dimension, ...], spec: "ModelSpec") -> tuple[int, ...]:
    return tuple(getattr(spec, size) if isinstance(size, str) else size for size in shape)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)
