"""Means with 95 % intervals, and comparisons paired by seed."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval; nan for a single value."""

    mean: float
    half: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval is on one side of zero."""
        return abs(self.mean) > self.half


def quantile_t(freedom: int, z: float = 1.959964) -> float:
    """97.5 % quantile of Student's t: exact for 1 to 4 degrees of freedom, from 5 on by its expansion, to 0.003."""
    if freedom <= 4:
        return (12.7062, 4.3027, 3.1824, 2.7764)[freedom - 1]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def interval(values: Sequence[float]) -> Interval:
    """Mean of values, one a seed, with its 95 % interval by Student's t."""
    n = len(values)
    half = stdev(values) / math.sqrt(n) * quantile_t(n - 1) if n > 1 else math.nan
    return Interval(mean(values), half)


def paired(first: dict[int, float], second: dict[int, float]) -> Interval | None:
    """first less second by seed, over the seeds that both have; None without any."""
    seeds = sorted(set(first) & set(second))
    return interval([first[seed] - second[seed] for seed in seeds]) if seeds else None


def shown(found: Interval | None, mark: bool = True) -> str:
    """+0.012 ± 0.004; bold where the interval is above zero, italic where it is below; a single seed without ±."""
    if found is None:
        return "–"
    if math.isnan(found.half):
        return f"{found.mean:+.3f} (one seed)"
    text = f"{found.mean:+.3f} ± {found.half:.3f}"
    sign = ("**" if found.mean > 0 else "_") if mark and found.excludes_zero else ""
    return f"{sign}{text}{sign}"
