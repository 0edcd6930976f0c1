"""What the metrics of a run have been, step by step."""

import math
from array import array
from collections.abc import Iterable, Mapping
from statistics import fmean, median

Metrics = Mapping[str, float | None]


class History:
    """The finite values of every metric, in the order of steps, up to the newest row."""

    def __init__(self, rows: Iterable[Metrics] = ()) -> None:
        """rows: of the steps before (read_metrics)."""
        self._values: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}
        self._count = 0
        self.newest: Metrics = {}
        for row in rows:
            self.add(row)

    def add(self, row: Metrics) -> None:
        """Take in the row of a step; it is the newest from now on."""
        self._count += 1
        self.newest = row
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                self._values.setdefault(name, array("d")).append(value)
                self._rows.setdefault(name, array("q")).append(self._count)

    def named(self, prefix: str) -> list[str]:
        """Metrics of any row whose names begin so."""
        return [name for name in self._values if name.startswith(prefix)]

    def values(self, name: str) -> list[float]:
        """All values of a metric; empty where the newest row has none, or one that is not finite."""
        value = self.newest.get(name)
        return list(self._values[name]) if value is not None and math.isfinite(value) else []

    def recent(self, name: str, count: int) -> float | None:
        """Median of the last `count` values; None before there are as many, or where the newest row has none."""
        values = self.values(name)
        return median(values[-count:]) if len(values) >= count else None

    def before(self, name: str, recent: int, fewest: int, window: int = 0) -> list[float]:
        """The last `window` values (0: all) before the `recent` newest; empty where they are fewer than `fewest`."""
        values = self.values(name)[: -recent or None][-window:]
        return values if len(values) >= fewest else []

    def highest(self, name: str, count: int) -> float | None:
        """The largest mean of `count` values in a row; None before there are as many."""
        values = self.values(name)
        if len(values) < count:
            return None
        total = best = sum(values[:count])
        for gone, new in zip(values, values[count:], strict=False):
            total += new - gone
            best = max(best, total)
        return best / count

    def around(self, name: str, other: str, index: int, width: int) -> float | None:
        """Mean of the last `width` values of `name` up to the row of the index-th value of `other`."""
        end = self._rows[other][index]
        values = [
            value for value, row in zip(self._values.get(name, ()), self._rows.get(name, ()), strict=True) if row <= end
        ][-width:]
        return fmean(values) if values else None
