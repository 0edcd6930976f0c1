"""Means with 95 % intervals, and comparisons paired by seed."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

import scipy.stats


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval; nan for a single value."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval is on one side of zero."""
        return abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval:
    """Mean of values, one a seed, with its 95 % interval by Student's t."""
    n = len(values)
    half = (
        stdev(values) / math.sqrt(n) * float(scipy.stats.t.ppf(0.975, n - 1)) if n > 1 else math.nan
    )
    return Interval(mean(values), half)


def paired(first: dict[int, float], second: dict[int, float]) -> Interval | None:
    """first less second by seed, over the seeds that both have; None without any."""
    seeds = sorted(set(first) & set(second))
    return interval([first[seed] - second[seed] for seed in seeds]) if seeds else None


def shown(found: Interval | None, mark: bool = True) -> str:
    """+0.012 ± 0.004; bold where the interval is above zero, italic where it is below; a single
    seed without ±."""
    if found is None:
        return "–"
    if math.isnan(found.half):
        return f"{found.mean:+.3f} (one seed)"
    text = f"{found.mean:+.3f} ± {found.half:.3f}"
    sign = ("**" if found.mean > 0 else "_") if mark and found.excludes_zero else ""
    return f"{sign}{text}{sign}"
