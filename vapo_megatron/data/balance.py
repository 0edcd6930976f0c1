"""Which data-parallel rank computes which samples, in which micro-batch."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.errors import BadInput


@dataclass(frozen=True)
class Cost:
    """Work of a sequence of n tokens: linear * n + quadratic * n^2, in any one unit."""

    linear: float
    quadratic: float

    @overload
    def __call__(self, n: int) -> float: ...
    @overload
    def __call__(self, n: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def __call__(self, n: Any) -> Any:
        """The work of n tokens, of each of several sequences where n is an array."""
        return self.linear * n + self.quadratic * n * n


# A bin is what one rank, or one micro-batch, is given: places in the arrays of works and tokens.
_Bins = list[list[int]]
_Loads = NDArray[np.float64] | NDArray[np.int64]

# Exchanges that even out a number of bins are at most this many a bin; a few a bin do nearly all of
# it.
_EXCHANGES = 32
# Accepted difference between ranks, relative to their mean work: single samples differ by more.
_TOLERANCE = 1e-6


class MicrobatchPlan(Sequence[list[list[int]]]):
    """[dp rank][micro-batch] -> samples, in ascending order. A rank's micro-batches are made when
    they are requested.

    Every rank has the same number of micro-batches, because collectives of a forward pass may cross
    data-parallel ranks (expert parallelism); some may be empty. Those of a rank come by falling
    work, so that ranks that wait for each other in every micro-batch wait least.

    Attributes:
        microbatches: how many each rank has.
        heaviest: work of the rank that has most.
    """

    def __init__(
        self,
        samples_at: Callable[[list[int]], NDArray[np.int64]],
        work: _Loads,
        tokens: _Loads,
        ranks: _Bins,
        count: int,
        budget: int,
    ) -> None:
        """samples_at: the samples of some places in work and tokens."""
        self.microbatches = count
        self.heaviest = max((float(work[rank].sum()) for rank in ranks), default=0.0)
        self._samples_at = samples_at
        self._work = work
        self._tokens = tokens
        self._ranks = ranks
        self._budget = budget

    def __len__(self) -> int:
        """Data-parallel ranks."""
        return len(self._ranks)

    def samples_of(self, dp_rank: int) -> NDArray[np.int64]:
        """All samples of a data-parallel rank, ascending."""
        return np.sort(self._samples_at(self._ranks[dp_rank]))

    def __getitem__(self, dp_rank: Any) -> Any:
        even = _packed(
            self._ranks[dp_rank], self._work, self._tokens, self.microbatches, self._budget
        )
        assert even is not None, (
            "the number of micro-batches is one that every rank's samples fit into"
        )
        even = _even_out(even, self._work, tokens=self._tokens, budget=self._budget)
        even.sort(key=lambda members: -self._work[members].sum())
        return [sorted(self._samples_at(members).tolist()) for members in even]


def plan_microbatches(
    samples: Sequence[int],
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    dp_size: int,
    max_tokens: int,
    cost: Cost,
    alignment: int = 1,
    total_alignment: int = 1,
    multiple_of: int = 1,
) -> MicrobatchPlan:
    """Balance samples over data-parallel ranks by work, then over as few micro-batches as hold
    them.

    Takes O(n log n) time for n samples, with no communication: ranks share the samples out alike,
    and agree on the number of micro-batches; each then packs its own samples alone.

    Args:
        samples: indices to distribute.
        lengths: tokens of each sample of the batch, by index.
        dp_size: data-parallel ranks.
        max_tokens: most padded tokens of a micro-batch.
        cost: the work of a sequence.
        alignment, total_alignment: padding of a sequence and of a micro-batch, see LayoutConfig.
        multiple_of: the number of micro-batches is a multiple of this (interleaved pipelines).

    Returns:
        The samples of each rank's micro-batches. The same arguments give the same plan on every
        rank.

    Raises:
        BadInput: a single sample is longer than max_tokens.
    """
    chosen = np.asarray(samples, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[chosen]
    work = cost(sizes.astype(np.float64))
    tokens = -(-np.maximum(sizes - 1, 1) // alignment) * alignment
    budget = token_budget(tokens, max_tokens, total_alignment)
    return level_plan(
        chosen.__getitem__, work, tokens, dp_size=dp_size, budget=budget, multiple_of=multiple_of
    )


def token_budget(tokens: NDArray[np.int64], max_tokens: int, total_alignment: int) -> int:
    """The most padded tokens of a micro-batch, a multiple of total_alignment.

    tokens: of each sample, padded. Raises BadInput: a single one is longer than max_tokens.
    """
    budget = max_tokens // total_alignment * total_alignment
    longest = int(tokens.max(initial=0))
    if longest > budget or not budget:
        needed = -(-max(longest, 1) // total_alignment) * total_alignment
        raise BadInput(
            f"max_tokens_per_microbatch={max_tokens} is below the {needed} tokens of the longest "
            "sample, padding included: raise it, or shorten the samples"
        )
    return budget


def level_plan(
    samples_at: Callable[[list[int]], NDArray[np.int64]],
    work: NDArray[np.float64],
    tokens: NDArray[np.int64],
    *,
    dp_size: int,
    budget: int,
    multiple_of: int,
) -> MicrobatchPlan:
    """As plan_microbatches, of items with their work and tokens, none above the budget.

    samples_at: the samples of some items, given their places in work and tokens.
    """
    level = work.sum() / dp_size * (1 + _TOLERANCE)
    ranks = _even_out(least_first(range(len(work)), work, dp_size), work, enough=level)
    count = max(1, *(-(-int(tokens[rank].sum()) // budget) for rank in ranks))
    count = -(-count // multiple_of) * multiple_of
    while any(_packed(rank, work, tokens, count, budget) is None for rank in ranks):
        count += multiple_of
    return MicrobatchPlan(samples_at, work, tokens, ranks, count, budget)


def _packed(rank: list[int], work: _Loads, tokens: _Loads, count: int, budget: int) -> _Bins | None:
    """A rank's samples in `count` micro-batches within the budget: of level work, changed until
    none is above it, else by best fit; None where both leave one above it."""
    even = _even_out(least_first(rank, work, count), tokens, enough=budget)
    if max(tokens[members].sum() for members in even) <= budget:
        return even
    return _best_fit(rank, tokens, count, budget)


def least_first(places: Iterable[int], work: _Loads, count: int) -> _Bins:
    """Longest processing time first: by falling work, each to the bin with least (Graham, 1969)."""
    bins: _Bins = [[] for _ in range(count)]
    heap = [(0.0, b) for b in range(count)]
    ascending = np.sort(np.fromiter(places, dtype=np.int64))
    falling = ascending[np.argsort(-work[ascending], kind="stable")]
    for place, load in zip(falling.tolist(), work[falling].tolist(), strict=True):
        least = heap[0][1]
        bins[least].append(place)
        heapq.heapreplace(heap, (heap[0][0] + load, least))
    return bins


def _best_fit(places: Iterable[int], tokens: _Loads, count: int, budget: int) -> _Bins | None:
    """By falling tokens, each to the fullest of `count` bins that has room; None where one finds
    none."""
    bins: _Bins = [[] for _ in range(count)]
    room = [budget] * count
    for place in sorted(places, key=lambda place: (-tokens[place], place)):
        fitting = [(room[b], b) for b in range(count) if room[b] >= tokens[place]]
        if not fitting:
            return None
        _, best = min(fitting)
        bins[best].append(place)
        room[best] -= int(tokens[place])
    return bins


def _even_out(
    bins: _Bins,
    loads: _Loads,
    *,
    enough: float = 0.0,
    tokens: _Loads | None = None,
    budget: int = 0,
) -> _Bins:
    """Even out the loads of bins by moves and exchanges between the most loaded one and the others,
    least loaded first.

    Ends where no bin is above `enough`, or where the most loaded one gains from no exchange. No bin
    is filled above the budget of tokens, where they are given.
    """
    bins = [list(members) for members in bins]
    total = np.array([loads[members].sum() for members in bins])
    for _ in range(_EXCHANGES * len(bins)):
        heavy = int(total.argmax())
        if total[heavy] <= enough:
            break
        for light in map(int, np.argsort(total, kind="stable")):
            if light == heavy:
                return bins
            change = _best_exchange(bins[heavy], bins[light], loads, tokens, budget)
            if change is not None:
                break
        else:
            return bins
        for members, leaves, comes in ((bins[heavy], *change), (bins[light], *change[::-1])):
            members[:] = [place for place in members if place not in leaves] + comes
        total[heavy], total[light] = loads[bins[heavy]].sum(), loads[bins[light]].sum()
    return bins


def _best_exchange(
    heavy: list[int], light: list[int], loads: _Loads, tokens: _Loads | None, budget: int
) -> tuple[list[int], list[int]] | None:
    """The move or swap between two bins that most reduces the larger load, as places leaving the
    heavier bin and places coming back (at most one); None where nothing reduces it."""
    gap = loads[heavy].sum() - loads[light].sum()
    leaving = loads[heavy]
    taken = np.append(loads[light], 0)
    moved = leaving[:, None] - taken
    useful = (moved > 0) & (moved < gap)
    if tokens is not None:
        change = tokens[heavy][:, None] - np.append(tokens[light], 0)
        useful &= (tokens[light].sum() + change <= budget) & (
            tokens[heavy].sum() - change <= budget
        )
    distance = np.where(useful, np.abs(moved - gap / 2), np.inf)
    best = int(distance.argmin())
    if not useful.flat[best]:
        return None
    row, column = divmod(best, distance.shape[1])
    return [heavy[row]], light[column : column + 1]
