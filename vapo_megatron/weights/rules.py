"""Rules that build a Megatron parameter from Hugging Face tensors, and these from its tensor-parallel shards.

A rule is both directions of one correspondence. It is pure: tensors in, tensors out. It knows nothing about which rank
owns a tensor or how shards travel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from vapo_megatron.weights.spec import ModelSpec

Dimension = int | str
"""A size, or the name of the ModelSpec attribute that gives it."""


class SliceableTensor(Protocol):
    """A Hugging Face tensor that can be sliced: a torch.Tensor, or one in a file."""

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    A tensor-parallel rank holds its share of the first tensor above that of the second and so on, or that once for each
    of several groups of their rows.

    Attributes:
        megatron: the parameter's name under local (not fused) layers, within its layer for a rule of a layer.
        hf: names of the Hugging Face tensors; "{layer}" and "{expert}" stand for the indices of layer and expert.
        shape: of each of them, dimension by dimension (of QKV: without the first).
        cut: the dimension of each that tensor-parallel ranks share out; None: each rank has all of it.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[Dimension, ...]

    cut: ClassVar[int | None] = 0

    def groups(self, spec: "ModelSpec") -> int:
        """Groups of rows over all ranks; if there are several, a rank holds whole groups."""
        return 1

    def hf_shapes(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""
        return [_sizes(self.shape, spec)] * len(self.hf)

    def shard_shape(self, spec: "ModelSpec", tp_size: int) -> tuple[int, ...]:
        """Shape of a tensor-parallel rank's parameter."""
        shares = [self._share(shape, tp_size) for shape in self.hf_shapes(spec)]
        return (sum(rows for rows, *_ in shares), *shares[0][1:])

    def to_shard(self, sources: Sequence[SliceableTensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> Tensor:
        """A tensor-parallel rank's parameter; only this rank's rows or columns of each source are read."""
        groups, mine = max(1, self.groups(spec) // tp_size), self._mine(spec, tp_rank, tp_size)
        shares = [source[index].unflatten(0, (groups, -1)) for source, index in zip(sources, mine, strict=True)]
        return (shares[0] if len(shares) == 1 else torch.cat(shares, dim=1)).flatten(0, 1)

    def to_hf(self, shards: Sequence[Tensor], spec: "ModelSpec") -> list[Tensor]:
        """The Hugging Face tensors, contiguous, in the order of `hf`, from the shards of all ranks in order."""
        wholes = [shards[0].new_empty(shape) for shape in self.hf_shapes(spec)]
        for rank, shard in enumerate(shards):
            self.place(shard, wholes, spec, rank, len(shards))
        return wholes

    def place(self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> None:
        """Copy a rank's shard to its place in the Hugging Face tensors, which are contiguous. The shards of all ranks
        fill them, in any order; where every rank has all of it, only rank 0's is used."""
        if self.cut is None and tp_rank > 0:
            return
        groups, mine = max(1, self.groups(spec) // tp_size), self._mine(spec, tp_rank, tp_size)
        targets = [whole[index].unflatten(0, (groups, -1)) for whole, index in zip(wholes, mine, strict=True)]
        shares = shard.unflatten(0, (groups, -1)).split([target.shape[1] for target in targets], dim=1)
        for target, share in zip(targets, shares, strict=True):
            target.copy_(share)

    def count(self, spec: "ModelSpec") -> int:
        """Parameters of the Hugging Face tensors."""
        return sum(math.prod(shape) for shape in self.hf_shapes(spec))

    def _share(self, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
        """Shape of a rank's share of a tensor."""
        return tuple(size // tp_size if dim == self.cut else size for dim, size in enumerate(shape))

    def _mine(self, spec: "ModelSpec", tp_rank: int, tp_size: int) -> list[tuple[slice, ...]]:
        """Position of this rank's share in each Hugging Face tensor."""
        places = []
        for shape in self.hf_shapes(spec):
            share = self._share(shape, tp_size)
            starts = [tp_rank * size if dim == self.cut else 0 for dim, size in enumerate(share)]
            places.append(tuple(slice(start, start + size) for start, size in zip(starts, share, strict=True)))
        return places


@dataclass(frozen=True)
class Replicated(Rule):
    """Whole on every tensor-parallel rank: norms, the router, the value head, the output projection of an expert."""

    cut = None


@dataclass(frozen=True)
class Row(Rule):
    """Cut along the input features, dimension 1 (Megatron's RowParallelLinear)."""

    cut = 1


@dataclass(frozen=True)
class Vocabulary(Rule):
    """A row per word, sharded along dimension 0; the table is padded with rows of zeros to a multiple of the ranks."""

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
    def place(self, shard: Tensor, wholes: Sequence[Tensor], spec: "ModelSpec", tp_rank: int, tp_size: int) -> None:
        mine = wholes[0][tp_rank * shard.shape[0] : (tp_rank + 1) * shard.shape[0]]
        mine.copy_(shard[: mine.shape[0]])


@dataclass(frozen=True)
class GateUp(Rule):
    """The halves of a gated MLP, each sharded along the output features; a rank holds its part of gate above up's."""


@dataclass(frozen=True)
class ExpertGateUp(GateUp):
    """The two halves of an expert's gated MLP: whole, since tensor-parallel ranks do not shard experts."""

    cut = None


@dataclass(frozen=True)
class QKV(Rule):
    """Query, key and value projections, weights or biases, interleaved by key-value group. Megatron's linear_qkv
    holds, group after group, the group's queries, its key and its value (SelfAttention's
    get_query_key_value_tensors); a rank holds whole groups."""

    @override
    def hf_shapes(self, spec: "ModelSpec") -> list[tuple[int, ...]]:
        rest = _sizes(self.shape, spec)
        return [(spec.query_size, *rest), (spec.kv_size, *rest), (spec.kv_size, *rest)]

    @override
    def groups(self, spec: "ModelSpec") -> int:
        return spec.num_kv_heads


def _sizes(shape: tuple[Dimension, ...], spec: "ModelSpec") -> tuple[int, ...]:
    return tuple(getattr(spec, size) if isinstance(size, str) else size for size in shape)
