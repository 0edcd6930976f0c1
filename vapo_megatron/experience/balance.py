"""Which data-parallel rank computes which samples, in which micro-batch."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.errors import BadInput


@dataclass(frozen=True)
class Cost:
    """Work of a sequence of n tokens: linear * n + quadratic * n^2, in any one unit."""

    linear: float
    quadratic: float

    def __call__(self, n: int) -> float:
        """The work of n tokens."""
        return self.linear * n + self.quadratic * n * n


# A bin is what one rank, or one micro-batch, is given: places in the arrays of works and tokens.
_Bins = list[list[int]]
_Loads = NDArray[np.float64] | NDArray[np.int64]

# Exchanges that even out a number of bins are at most this many a bin; a few a bin do nearly all of it.
_EXCHANGES = 32
# What is left of ranks' differences, relative to their mean work: single samples differ by more.
_TOLERANCE = 1e-8
# Places of a bin of which pairs are made.
_PAIRED = 128


def plan_microbatches(
    samples: Sequence[int],
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    cost: Cost,
    alignment: int = 1,
    total_alignment: int = 1,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Balance samples over data-parallel ranks by work, then over as few micro-batches as hold them.

    Args:
        samples: indices to distribute.
        lengths: tokens of each sample of the batch, by index.
        dp_size: data-parallel ranks.
        max_tokens: most padded tokens of a micro-batch.
        cost: the work of a sequence.
        alignment, total_alignment: padding of a sequence and of a micro-batch, see LayoutConfig.
        multiple_of: the number of micro-batches is a multiple of this (interleaved pipelines).

    Returns:
        [dp rank][micro-batch] -> samples, in ascending order. Every rank has the same number of micro-batches, because
        collectives of a forward pass may cross data-parallel ranks (expert parallelism); some may be empty. Those of a
        rank come by falling work, so that ranks that wait for each other in every micro-batch wait least. The same
        arguments give the same plan on every rank.

    Raises:
        BadInput: a single sample is longer than max_tokens.
    """

    def padded(sample: int) -> int:
        return -(-max(lengths[sample] - 1, 1) // alignment) * alignment

    budget = max_tokens // total_alignment * total_alignment
    work = np.array([cost(lengths[s]) for s in samples], dtype=np.float64)
    tokens = np.array([padded(s) for s in samples], dtype=np.int64)
    longest = int(tokens.max(initial=0))
    if longest > budget or not budget:
        needed = -(-max(longest, 1) // total_alignment) * total_alignment
        raise BadInput(
            f"max_tokens_per_microbatch={max_tokens} is below the {needed} tokens of the longest sample, padding "
            "included: raise it, or shorten the samples"
        )
    everything = list(range(len(samples)))
    level = work.sum() / dp_size * (1 + _TOLERANCE)
    ranks = _even_out(_least_first(everything, work, dp_size), work, enough=level)
    count = max(1, *(-(-int(tokens[rank].sum()) // budget) for rank in ranks))
    count = -(-count // multiple_of) * multiple_of
    while (plans := _pack_all(ranks, work, tokens, count, budget)) is None:
        count += multiple_of
    return [[sorted(samples[place] for place in members) for members in plan] for plan in plans]


def _pack_all(ranks: _Bins, work: _Loads, tokens: _Loads, count: int, budget: int) -> list[_Bins] | None:
    """Every rank's samples in `count` micro-batches each, by falling work; None where some rank's do not fit."""
    plans = []
    for rank in ranks:
        even = _even_out(_least_first(rank, work, count), tokens, enough=budget)
        if max(tokens[members].sum() for members in even) > budget:
            fitting = _best_fit(rank, tokens, count, budget)
            if fitting is None:
                return None
            even = fitting
        even = _even_out(even, work, tokens=tokens, budget=budget)
        plans.append(sorted(even, key=lambda members: -work[members].sum()))
    return plans


def _least_first(places: Iterable[int], work: _Loads, count: int) -> _Bins:
    """Longest processing time first: by falling work, each to the bin with least (Graham, 1969)."""
    bins: _Bins = [[] for _ in range(count)]
    heap = [(0.0, b) for b in range(count)]
    for place in sorted(places, key=lambda place: (-work[place], place)):
        load, least = heap[0]
        bins[least].append(place)
        heapq.heapreplace(heap, (load + float(work[place]), least))
    return bins


def _best_fit(places: Iterable[int], tokens: _Loads, count: int, budget: int) -> _Bins | None:
    """By falling tokens, each to the fullest of `count` bins that has room; None where one finds none."""
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
    bins: _Bins, loads: _Loads, *, enough: float = 0.0, tokens: _Loads | None = None, budget: int = 0
) -> _Bins:
    """Even out the loads of bins by moves and exchanges between the most loaded one and the others, least loaded first.

    Ends where no bin is above `enough`, or where the most loaded one gains from no exchange. No bin is filled above the
    budget of tokens, where they are given.
    """
    bins = [list(members) for members in bins]
    total = np.array([loads[members].sum() for members in bins], dtype=np.float64)
    for _ in range(_EXCHANGES * len(bins)):
        heavy = int(total.argmax())
        if total[heavy] <= enough:
            break
        for light in map(int, np.argsort(total, kind="stable")):
            if light == heavy:
                return bins
            change = _best_exchange(bins[heavy], bins[light], loads, tokens, budget)
            if change is None and tokens is None:
                change = _best_exchange_of_pairs(
                    bins[heavy][:_PAIRED], bins[light][:_PAIRED], loads, total[heavy] - total[light]
                )
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
    """What a bin gives to a lighter one, and what it takes for it (nothing, or one place), so that the larger of both
    loads becomes smallest; None where nothing makes it smaller."""
    gap = loads[heavy].sum() - loads[light].sum()
    moved = loads[heavy][:, None] - np.append(loads[light], 0)
    useful = (moved > 0) & (moved < gap)
    if tokens is not None:
        change = tokens[heavy][:, None] - np.append(tokens[light], 0)
        useful &= (tokens[light].sum() + change <= budget) & (tokens[heavy].sum() - change <= budget)
    distance = np.where(useful, np.abs(moved - gap / 2), np.inf)
    best = int(distance.argmin())
    if distance.size == 0 or not useful.flat[best]:
        return None
    given, taken = divmod(best, len(light) + 1)
    return [heavy[given]], light[taken : taken + 1]


def _best_exchange_of_pairs(
    heavy: list[int], light: list[int], loads: _Loads, gap: float
) -> tuple[list[int], list[int]] | None:
    """Like _best_exchange, two places for two: sums of pairs lie far closer to each other than single loads do."""
    (a, b), (c, d) = np.triu_indices(len(heavy), 1), np.triu_indices(len(light), 1)
    given, taken = loads[heavy][a] + loads[heavy][b], loads[light][c] + loads[light][d]
    if not len(given) or not len(taken):
        return None
    order = taken.argsort(kind="stable")
    nearest = np.searchsorted(taken[order], given - gap / 2).clip(max=len(taken) - 1)
    moved = given - taken[order][nearest]
    distance = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
    best = int(distance.argmin())
    if not np.isfinite(distance[best]):
        return None
    other = order[nearest[best]]
    return [heavy[a[best]], heavy[b[best]]], [light[c[other]], light[d[other]]]
