"""Rules that build a Megatron parameter from Hugging Face tensors, and these from its
tensor-parallel shards.

A rule is both directions of one correspondence. It is pure: tensors in, tensors out. It knows
nothing about which rank owns a tensor or how shards travel.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override


class SliceableTensor(Protocol):
    """A Hugging Face tensor that can be sliced: a torch.Tensor, or one in a file."""

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    A tensor-parallel rank holds its share of the first tensor above its share of the second and
    so on, or that once for each of several groups of their rows.

    Attributes:
        megatron: the parameter's name under local (not fused) layers, within its layer for a rule
            of a layer.
        hf: names of the Hugging Face tensors; "{layer}" and "{expert}" stand for the indices of
            layer and expert.
        shape: of each of them (of QKV: without the first dimension).
        cut: the dimension of each that tensor-parallel ranks share out; None: each rank has all of
            it.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]

    cut: ClassVar[int | None] = 0

    @property
    def groups(self) -> int:
        """Groups of rows over all ranks; if there are several, a rank holds whole groups."""
        return 1

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear layer of the transformer: what FP8 and adapters may
        touch."""
        return ".linear_" in self.megatron and self.megatron.endswith(".weight")

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of what the parameter holds, in order: each is a Hugging Face tensor, except
        rules of fused tensors, where it is a block of rows of one."""
        return [self.shape] * len(self.hf)

    def hf_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""
        return self.block_shapes()

    def file_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors in the files, in the order of `hf`: as hf_shapes(), except
        rules of tensors that hold all experts."""
        return self.hf_shapes()

    def of_expert(self, tensor: Any, expert: int | None) -> Any:
        """What an expert's parameter holds of a torch.Tensor, or of one in a file: all of it."""
        return tensor

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of a tensor-parallel rank's parameter."""
        shares = [self._share(shape, tp_size) for shape in self.block_shapes()]
        return (sum(rows for rows, *_ in shares), *shares[0][1:])

    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        """A tensor-parallel rank's parameter; only this rank's rows or columns of each source are
        read."""
        groups = max(1, self.groups // tp_size)
        shares = [
            source[index].unflatten(0, (groups, -1))
            for source, index in zip(sources, self._mine(tp_rank, tp_size), strict=True)
        ]
        return (shares[0] if len(shares) == 1 else torch.cat(shares, dim=1)).flatten(0, 1)

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors, contiguous, in the order of `hf`, from the shards of all ranks
        in order."""
        wholes = [shards[0].new_empty(shape) for shape in self.hf_shapes()]
        for rank, shard in enumerate(shards):
            self.place(shard, wholes, rank, len(shards))
        return wholes

    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        """Copy a rank's shard to its place in the Hugging Face tensors, which are contiguous. The
        shards of all ranks fill them, in any order; where every rank has all of it, only rank 0's
        is used."""
        if self.cut is None and tp_rank > 0:
            return
        groups = max(1, self.groups // tp_size)
        targets = [
            whole[index].unflatten(0, (groups, -1))
            for whole, index in zip(wholes, self._mine(tp_rank, tp_size), strict=True)
        ]
        shares = shard.unflatten(0, (groups, -1)).split(
            [target.shape[1] for target in targets], dim=1
        )
        for target, share in zip(targets, shares, strict=True):
            target.copy_(share)

    def cast(self, wanted: torch.dtype | None, held: torch.dtype) -> torch.dtype:
        """dtype in which a tensor held in `held` is written where `wanted` is requested (None: no
        other)."""
        return wanted or held

    def count(self) -> int:
        """Parameters of the Hugging Face tensors."""
        return sum(math.prod(shape) for shape in self.hf_shapes())

    def _share(self, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
        """Shape of a rank's share of a tensor."""
        return tuple(size // tp_size if dim == self.cut else size for dim, size in enumerate(shape))

    def _mine(self, tp_rank: int, tp_size: int) -> list[tuple[slice, ...]]:
        """Position of this rank's share in each Hugging Face tensor."""
        places = []
        for shape in self.block_shapes():
            share = self._share(shape, tp_size)
            starts = [tp_rank * size if dim == self.cut else 0 for dim, size in enumerate(share)]
            places.append(
                tuple(slice(start, start + size) for start, size in zip(starts, share, strict=True))
            )
        return places


@dataclass(frozen=True)
class Replicated(Rule):
    """Whole on every tensor-parallel rank: norms, the router, the value head, the output projection
    of an expert."""

    cut = None


@dataclass(frozen=True)
class ExactVector(Replicated):
    """Numbers whose rounding would change a choice, such as the biases that select experts: never
    cast."""

    @override
    def cast(self, wanted: torch.dtype | None, held: torch.dtype) -> torch.dtype:
        return held


@dataclass(frozen=True)
class Row(Rule):
    """Cut along the input features, dimension 1 (Megatron's RowParallelLinear)."""

    cut = 1


@dataclass(frozen=True)
class Vocabulary(Rule):
    """A row per word, sharded along dimension 0; the table is padded with rows of zeros to a
    multiple of `divisible_by` times the ranks."""

    divisible_by: int = 1

    @override
    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        words, *rest = self.shape
        return (-(-words // (self.divisible_by * tp_size)) * self.divisible_by, *rest)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        words = self.shape[0]
        rows = self.shard_shape(tp_size)[0]
        first = min(tp_rank * rows, words)
        real = sources[0][first : min(first + rows, words)]
        if real.shape[0] == rows:
            return real
        return torch.cat((real, real.new_zeros(rows - real.shape[0], *real.shape[1:])))

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        mine = wholes[0][tp_rank * shard.shape[0] : (tp_rank + 1) * shard.shape[0]]
        mine.copy_(shard[: mine.shape[0]])


@dataclass(frozen=True)
class GateUp(Rule):
    """The halves of a gated MLP, each sharded along the output features; a rank holds its part of
    gate above up's."""


@dataclass(frozen=True)
class ExpertGateUp(GateUp):
    """The two halves of an expert's gated MLP: whole, since tensor-parallel ranks do not shard
    experts."""

    cut = None


@dataclass(frozen=True)
class QKV(Rule):
    """Query, key and value projections, weights or biases, interleaved by key-value group.
    Megatron's linear_qkv holds, group after group, the group's queries, its key and its value
    (SelfAttention's get_query_key_value_tensors); a rank holds whole groups.

    Attributes:
        query_size, kv_size: rows of the query projection, and of the key or value projection.
        kv_heads: groups.
    """

    query_size: int
    kv_size: int
    kv_heads: int

    @override
    def block_shapes(self) -> list[tuple[int, ...]]:
        return [(rows, *self.shape) for rows in (self.query_size, self.kv_size, self.kv_size)]

    @property
    @override
    def groups(self) -> int:
        return self.kv_heads


class _Rows:
    """Some rows of a tensor, which is sliced when they are read."""

    def __init__(self, tensor: SliceableTensor, start: int) -> None:
        self._tensor = tensor
        self._start = start

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, *others = index
        rows = slice(self._start + rows.start, self._start + rows.stop)
        return self._tensor[(rows, *others)]


class _Fused(Rule):
    """A rule whose blocks stand one above the other in a single Hugging Face tensor."""

    @override
    def hf_shapes(self) -> list[tuple[int, ...]]:
        blocks = self.block_shapes()
        return [(sum(rows for rows, *_ in blocks), *blocks[0][1:])]

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        blocks = []
        start = 0
        for rows, *_ in self.block_shapes():
            blocks.append(_Rows(sources[0], start))
            start += rows
        return super().to_shard(blocks, tp_rank, tp_size)

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        blocks = wholes[0].split([rows for rows, *_ in self.block_shapes()])
        super().place(shard, blocks, tp_rank, tp_size)


@dataclass(frozen=True)
class FusedGateUp(_Fused, GateUp):
    """Gate above up in one tensor. shape: of each of the two."""

    @override
    def block_shapes(self) -> list[tuple[int, ...]]:
        return [self.shape, self.shape]


@dataclass(frozen=True)
class FusedQKV(_Fused, QKV):
    """Queries above keys above values in one tensor."""


@dataclass(frozen=True)
class GatedQKV(QKV):
    """QKV whose query projection has, head after head, a query and its gate. In Megatron's group
    all queries stand above their gates (TransformerConfig.attention_output_gate). query_size counts
    both.

    Attributes:
        head_dim: channels of a head.
    """

    head_dim: int

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        shard = super().to_shard(sources, tp_rank, tp_size)
        return self._reordered(shard, self._order(), tp_size)

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        shard = self._reordered(shard, self._order().argsort(), tp_size)
        super().place(shard, wholes, tp_rank, tp_size)

    def _reordered(self, shard: Tensor, order: Tensor, tp_size: int) -> Tensor:
        groups = shard.unflatten(0, (self.kv_heads // tp_size, -1))
        return groups[:, order].flatten(0, 1)

    def _order(self) -> Tensor:
        """Of a group's rows in the files, those that follow one another in Megatron."""
        queries = self.query_size // self.kv_heads
        rows = torch.arange(queries + 2 * self.kv_size // self.kv_heads)
        pairs = rows[:queries].view(-1, 2, self.head_dim).transpose(0, 1)
        return torch.cat((pairs.flatten(), rows[queries:]))


@dataclass(frozen=True)
class HeadGroups(Rule):
    """Tensors with rows for every head, in one parameter head after head; a rank holds whole heads
    (the projections and the convolution of a gated delta net). shape is each tensor's without
    its first dimension.

    Attributes:
        blocks: for each Hugging Face tensor the rows of its blocks, which stand one above the
            other; each has the heads in order.
        heads: over all ranks.
    """

    blocks: tuple[tuple[int, ...], ...]
    heads: int

    @override
    def block_shapes(self) -> list[tuple[int, ...]]:
        return [(rows, *self.shape) for tensor in self.blocks for rows in tensor]

    @override
    def hf_shapes(self) -> list[tuple[int, ...]]:
        return [(sum(tensor), *self.shape) for tensor in self.blocks]

    @property
    @override
    def groups(self) -> int:
        return self.heads

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        blocks = [
            _Rows(source, end - rows)
            for source, tensor in zip(sources, self.blocks, strict=True)
            for rows, end in zip(tensor, itertools.accumulate(tensor), strict=True)
        ]
        return super().to_shard(blocks, tp_rank, tp_size)

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        blocks = [
            block
            for whole, tensor in zip(wholes, self.blocks, strict=True)
            for block in whole.split(tensor)
        ]
        super().place(shard, blocks, tp_rank, tp_size)


@dataclass(frozen=True)
class WholeHeadGroups(HeadGroups):
    """The same, whole on every tensor-parallel rank."""

    cut = None

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        return super().to_shard(sources, 0, 1)

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        if tp_rank == 0:
            super().place(shard, wholes, 0, 1)
