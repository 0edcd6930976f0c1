"""Metrics of past steps, by name."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from statistics import fmean, median

import numpy as np

Metrics = Mapping[str, float | None]


class History:
    """The finite values of every metric in the order of steps."""

    def __init__(self, rows: Iterable[Metrics] = ()) -> None:
        """rows: of earlier steps (read_metrics)."""
        self._values: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}
        self._count = 0
        self.newest: Metrics = {}
        for row in rows:
            self.add(row)

    def add(self, row: Metrics) -> None:
        """Append the row of a step, which becomes the newest."""
        self._count += 1
        self.newest = row
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                self._values.setdefault(name, array("d")).append(value)
                self._rows.setdefault(name, array("q")).append(self._count)

    def named(self, prefix: str) -> list[str]:
        """Metrics of any row whose names begin with prefix."""
        return [name for name in self._values if name.startswith(prefix)]

    def values(self, name: str) -> list[float]:
        """All values of a metric; empty if the newest row has no finite one."""
        return list(self._series(name))

    def recent(self, name: str, count: int) -> float | None:
        """Median of the last `count` values; None if there are fewer, or if the newest row has
        none."""
        values = self._series(name)
        return median(values[-count:]) if len(values) >= count else None

    def before(self, name: str, recent: int, fewest: int, window: int = 0) -> list[float]:
        """The last `window` values (0: all) before the `recent` newest; empty where they are fewer
        than `fewest`."""
        values = self._series(name)
        end = len(values) - recent
        if end < fewest:
            return []
        start = max(0, end - window) if window else 0
        return list(values[start : max(0, end)])

    def highest(self, name: str, count: int) -> float | None:
        """The largest mean of `count` consecutive values; None if there are fewer."""
        values = self._series(name)
        if len(values) < count:
            return None
        sums = np.concatenate(([0.0], np.cumsum(values)))
        return float((sums[count:] - sums[:-count]).max() / count)

    def around(self, name: str, other: str, index: int, width: int) -> float | None:
        """Mean of the last `width` values of `name` up to the row of the index-th value of
        `other`."""
        end = bisect_right(self._rows.get(name, ()), self._rows[other][index])
        values = self._values[name][max(0, end - width) : end] if end else ()
        return fmean(values) if values else None

    def _series(self, name: str) -> "array[float]":
        """Without a copy, which a long run would pay for at each step and rule."""
        value = self.newest.get(name)
        known = value is not None and math.isfinite(value)
        return self._values[name] if known else array("d")
