"""Where a model's loader puts the tensors of a bucket: learnt while it is watched, and replayed as
plain copies when the same names and shapes come again."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.weights.bucket import Place, view


class Copied(NamedTuple):
    """Part of an arriving tensor: elements from its first one on, shape and strides."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Write(NamedTuple):
    """One write to a parameter: a view of it, and the source of the copy; or how it is filled."""

    target: Tensor
    source: Copied | None
    fill: tuple[Any, tuple[Any, ...]] | None = None


@dataclass
class Placement:
    """What a loader did with one tensor, or outside of any (tensor None).

    Attributes:
        writes: to parameters, in their order.
        is_plain: whether it did nothing else than look at views. Anything more (a product, a copy
            of its own, a value that was read) might differ the next time, or have an effect that
            copies do not have.
        written: engine parameter name -> elements.
        source: the tensor, in words.
    """

    tensor: Tensor | None
    writes: list[Write] = field(default_factory=list)
    is_plain: bool = True
    written: Counter[str] = field(default_factory=Counter)
    source: str = ""

    def saw(self, function: Any, args: Sequence[Any], is_write: bool, keywords: bool) -> None:
        """Note one operation; is_write: a copy to a parameter, or that one is filled."""
        if not is_write:
            self.is_plain &= _only_views(function)
            return
        if keywords or self.tensor is None:
            self.is_plain = False
        elif function is torch.ops.aten.copy_.default:
            source = _part_of(self.tensor, args[1]) if len(args) == 2 else None
            self.is_plain &= source is not None
            self.writes.append(Write(args[0].detach(), source))
        else:
            self.is_plain &= not any(isinstance(value, Tensor) for value in args[1:])
            self.writes.append(Write(args[0].detach(), None, (function, tuple(args[1:]))))


def _only_views(function: Any) -> bool:
    """Whether an operation neither writes nor computes: all that it returns are views."""
    schema = function._schema
    return (
        not schema.is_mutable
        and bool(schema.returns)
        and all(value.alias_info is not None for value in schema.returns)
    )


def _part_of(tensor: Tensor, source: Any) -> Copied | None:
    """Which part of a tensor a source is; None where it is none."""
    if (
        not isinstance(source, Tensor)
        or source.dtype != tensor.dtype
        or source.is_conj()
        or source.is_neg()
        or source.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    ):
        return None
    offset = source.storage_offset() - tensor.storage_offset()
    last = offset + sum(
        (size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)
    )
    if not source.numel() or offset < 0 or last >= tensor.numel():
        return None
    return Copied(int(offset), tuple(source.shape), tuple(source.stride()))


@dataclass
class BucketReplay:
    """The writes of a bucket whose tensors stand at known places.

    Attributes:
        others: places of the tensors with which the loader does more than copy, and of all that
            share a parameter with these. It is called for them.
        written: engine parameter name -> elements, by all but the others.
        sources: engine parameter name -> the tensors that filled it, in words, but for the others.
        unknown: the problem lines of tensors that filled nothing on this rank.
        runs: writes in their order: copies that follow one another, or one fill.
        compared: whether its result was found equal to the loader's.
        is_own: whether this rank reads nothing but the shares of the trainer's rank of its number.
        digest: of the checksums of the bucket's tensors that were written last.
        held: weights.changes.placed_sum() of what parameters hold of it, after that.
    """

    places: Sequence[Place]
    others: Sequence[Place]
    written: Counter[str]
    sources: Mapping[str, Sequence[str]]
    unknown: Sequence[str]
    runs: list[list[tuple[Place, Write]]]
    compared: bool = False
    is_own: bool = False
    digest: str = ""
    held: int = 0

    @classmethod
    def of(
        cls, places: Sequence[Place], placements: Sequence[Placement], unknown: Sequence[str]
    ) -> "BucketReplay | None":
        """None where nothing can be copied, or not in a certain order."""
        if len(places) != len(placements):
            return None
        shared = _computed_parameters(placements)
        others: list[Place] = []
        written: Counter[str] = Counter()
        sources: defaultdict[str, list[str]] = defaultdict(list)
        runs: list[list[tuple[Place, Write]]] = [[]]
        targets = set()
        for place, placement in zip(places, placements, strict=True):
            if not placement.is_plain or placement.written.keys() & shared:
                others.append(place)
                continue
            written += placement.written
            for name in placement.written:
                sources[name].append(placement.source)
            for write in placement.writes:
                held = write.target
                if write.fill is not None:
                    runs += [[(place, write)], []]
                    continue
                target = held.data_ptr(), tuple(held.shape), held.stride()
                if target in targets:
                    return None
                targets.add(target)
                runs[-1].append((place, write))
        if len(others) == len(places):
            return None
        return cls(places, others, written, sources, unknown, [run for run in runs if run])

    @property
    def is_readable(self) -> bool:
        """Whether the parameters hold the very bytes that are written to them."""
        if self.others:
            return False
        copies = [
            (place, write, write.source)
            for run in self.runs
            for place, write in run
            if write.source is not None
        ]
        return all(
            write.target.dtype == getattr(torch, place.dtype)
            and all(step or size == 1 for size, step in zip(part.shape, part.stride, strict=True))
            for place, write, part in copies
        )

    @torch.no_grad()
    def run(self, buffer: Tensor) -> None:
        """Write a bucket's bytes to the parameters, but for the others'."""
        for run in self.runs:
            if run[0][1].fill is not None:
                ((_, write),) = run
                assert write.fill is not None
                function, arguments = write.fill
                function(write.target, *arguments)
                continue
            torch._foreach_copy_([write.target for _, write in run], _sources(buffer, run))

    def reads_within(self, mask: Tensor) -> bool:
        """Whether every element that is read from a bucket is above zero in its mask
        (weights.gather.mask_own_shares). The loader may read all of the other tensors."""
        copies = (
            part for run in self.runs if run[0][1].fill is None for part in _sources(mask, run)
        )
        others = (view(mask, place) for place in self.others)
        return all(bool((part > 0).all()) for part in itertools.chain(copies, others))

    @torch.no_grad()
    def read_back(self, buffer: Tensor) -> None:
        """Fill a buffer with the bytes of the bucket that parameters hold, and zeros elsewhere."""
        buffer.zero_()
        for run in self.runs:
            if run[0][1].fill is not None:
                continue
            torch._foreach_copy_(_sources(buffer, run), [write.target for _, write in run])


def _computed_parameters(placements: Sequence[Placement]) -> set[str]:
    """Names of the parameters that are filled by more than copies of views, and of those that are
    filled by a tensor that also fills such a one."""
    found: set[str] = set()
    pending = True
    while pending:
        touched = [
            placement.written.keys()
            for placement in placements
            if not placement.is_plain or placement.written.keys() & found
        ]
        more = set(itertools.chain.from_iterable(touched)) - found
        found |= more
        pending = bool(more)
    return found


def _sources(buffer: Tensor, run: Sequence[tuple[Place, Write]]) -> list[Tensor]:
    """The parts of a bucket that a run of copies reads, as views of its bytes."""
    typed: dict[str, Tensor] = {}
    sources = []
    for place, write in run:
        assert write.source is not None
        if place.dtype not in typed:
            dtype: torch.dtype = getattr(torch, place.dtype)
            whole = buffer.numel() // dtype.itemsize * dtype.itemsize
            typed[place.dtype] = buffer[:whole].view(dtype)
        elements = typed[place.dtype]
        offset = elements.storage_offset() + place.start // elements.itemsize
        offset += write.source.offset
        sources.append(elements.as_strided(write.source.shape, write.source.stride, offset))
    return sources
