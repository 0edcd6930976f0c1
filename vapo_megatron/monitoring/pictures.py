"""Pictures of figures: the same data drawn in a terminal's width here, and as SVG by the report
(operations/report/templates/pictures.js)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

# Colours of parts, and their marks where there are no colours.
_STYLES = ("blue", "dark_orange", "green", "magenta", "red", "cyan", "yellow", "bright_blue")
_MARKS = "█▓▒░#=+o"
_MOST_PARTS = len(_MARKS)
_NARROWEST = 24  # columns of a drawing
_HEIGHT = 12  # lines of a scatter


@dataclass(frozen=True)
class Bars:
    """A bar a row, of parts that add up. limit: a level that no bar should reach."""

    title: str
    unit: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    limit: float | None = None
    kind: str = field(default="bars", init=False)


@dataclass(frozen=True)
class Intervals:
    """A row for each figure: label, low, figure, high. line: a level to compare with."""

    title: str
    rows: Sequence[tuple[str, float, float, float]]
    low: float
    high: float
    line: float | None = None
    kind: str = field(default="intervals", init=False)


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers between edges, one more than counts. line: a level to compare with."""

    title: str
    unit: str
    edges: Sequence[float]
    counts: Sequence[int]
    line: float | None = None
    kind: str = field(default="histogram", init=False)


@dataclass(frozen=True)
class Scatter:
    """Points (x, y) and the diagonal, on which they would be equal; means: of y by groups of x."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[float, float]]
    means: Sequence[tuple[float, float]] = ()
    kind: str = field(default="scatter", init=False)


Picture = Bars | Intervals | Histogram | Scatter


def as_data(picture: Picture) -> dict[str, Any]:
    """For JSON."""
    return asdict(picture)


def histogram(
    title: str, unit: str, values: Sequence[float], low: float, high: float, bins: int, line: float
) -> Histogram:
    """The values in `bins` equal bins from low to high; a value at an inner edge counts above
    it."""
    width = (high - low) / bins
    edges = [low + number * width for number in range(bins + 1)]
    counts = [0] * bins
    for value in values:
        # 1e-9: shares are fractions, and an edge in binary may be just above one
        place = math.floor((value - low) / width + 1e-9)
        counts[min(max(place, 0), bins - 1)] += 1
    return Histogram(title, unit, edges, counts, line)


def means_by_rank(points: Sequence[tuple[float, float]], groups: int) -> list[tuple[float, float]]:
    """Mean x and y of groups of equally many points, ordered by x."""
    ordered = sorted(points)
    count = min(groups, len(ordered))
    bounds = [len(ordered) * number // max(count, 1) for number in range(count + 1)]
    parts = [ordered[start:end] for start, end in pairwise(bounds)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def show_picture(picture: Picture, console: Console) -> None:
    """Draw a picture in the console's width."""
    draw: dict[str, Callable[[Any, int], Text]] = {
        "bars": _bars,
        "intervals": _intervals,
        "histogram": _histogram,
        "scatter": _scatter,
    }
    width = min(console.width, 120)
    console.print(Text(picture.title, style="bold"))
    console.print(draw[picture.kind](picture, width), soft_wrap=True, highlight=False)


def _bars(picture: Bars, width: int) -> Text:
    totals = [sum(size for _, size in parts) for _, parts in picture.rows]
    most = max([*totals, picture.limit or 0.0]) or 1.0
    names = _main_parts(picture)
    label = max((len(name) for name, _ in picture.rows), default=0)
    room = max(_NARROWEST, width - label - 12)
    text = Text()
    for (name, parts), total in zip(picture.rows, totals, strict=True):
        text.append(f"{name:<{label}} ")
        done = 0.0
        drawn = 0
        for number, size in enumerate(_sizes(parts, names)):
            done += size
            cells = round(done / most * room) - drawn
            text.append(_MARKS[number] * cells, style=_STYLES[number])
            drawn += cells
        limit = None if picture.limit is None else round(picture.limit / most * room)
        rest = " " * (room - drawn)
        if limit is not None and limit - 1 >= drawn:
            rest = " " * (limit - 1 - drawn) + "│" + " " * (room - limit)
        text.append(f"{rest} {total:,.1f}\n")
    for number, part in enumerate(names):
        text.append(f"{_MARKS[number]} ", style=_STYLES[number])
        text.append(f"{part}  ")
    unit = f"{picture.unit}" + ("" if picture.limit is None else f", │ {picture.limit:,.1f}")
    text.append(f"({unit})\n", style="dim")
    return text


def _main_parts(picture: Bars) -> list[str]:
    """The parts that have their own mark, largest first; the others are drawn as one."""
    sizes: dict[str, float] = {}
    for _, parts in picture.rows:
        for name, size in parts:
            sizes[name] = max(sizes.get(name, 0.0), size)
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    if len(ordered) <= _MOST_PARTS:
        return ordered
    return [*ordered[: _MOST_PARTS - 1], "other"]


def _sizes(parts: Sequence[tuple[str, float]], names: Sequence[str]) -> list[float]:
    found = dict(parts)
    sizes = [found.pop(name, 0.0) for name in names]
    if names and names[-1] == "other":
        sizes[-1] += sum(found.values())
    return sizes


def _intervals(picture: Intervals, width: int) -> Text:
    label = max((len(name) for name, *_ in picture.rows), default=0)
    room = max(_NARROWEST, width - label - 28)
    span = picture.high - picture.low or 1.0

    def place(value: float) -> int:
        share = (value - picture.low) / span
        return min(max(round(share * (room - 1)), 0), room - 1)

    text = Text()
    for name, low, figure, high in picture.rows:
        cells = [" "] * room
        if picture.line is not None:
            cells[place(picture.line)] = "┊"
        start, end = place(low), place(high)
        cells[start : end + 1] = ["─"] * (end + 1 - start)
        cells[start], cells[end] = "├", "┤"
        cells[place(figure)] = "●"
        text.append(f"{name:<{label}} ")
        text.append("".join(cells), style="blue")
        text.append(f" {figure:.3f} [{low:.3f}, {high:.3f}]\n")
    text.append(_axis(" " * (label + 1), picture.low, picture.high, room))
    return text


def _axis(indent: str, low: float, high: float, room: int) -> Text:
    ends = f"{low:.3g}", f"{(low + high) / 2:.3g}", f"{high:.3g}"
    middle = room // 2 - len(ends[1]) // 2
    line = ends[0].ljust(middle) + ends[1]
    line = line.ljust(room - len(ends[2])) + ends[2]
    return Text(f"{indent}{line}\n", style="dim")


def _histogram(picture: Histogram, width: int) -> Text:
    most = max(picture.counts, default=0) or 1
    labels = [f"{low:+.2f} to {high:+.2f}" for low, high in pairwise(picture.edges)]
    label = max(map(len, labels))
    room = max(_NARROWEST, width - label - 10)
    text = Text()
    for (low, high), name, count in zip(
        pairwise(picture.edges), labels, picture.counts, strict=True
    ):
        style = "blue"
        if picture.line is not None and high <= picture.line + 1e-9:
            style = "red"
        if picture.line is not None and low <= picture.line < high - 1e-9:
            style = "bright_black"
        cells = math.ceil(count / most * room) if count else 0
        text.append(f"{name:>{label}} ")
        text.append("█" * cells, style=style)
        text.append(f" {count}\n" if count else "\n")
    text.append(f"({picture.unit})\n", style="dim")
    return text


def _scatter(picture: Scatter, width: int) -> Text:
    every = [number for point in (*picture.points, *picture.means) for number in point]
    low, high = min(every, default=0.0), max(every, default=1.0)
    span = high - low or 1.0
    room = min(max(_NARROWEST, width - 12), 4 * _HEIGHT)
    cells = [[" "] * room for _ in range(_HEIGHT)]

    def put(x: float, y: float, mark: str) -> None:
        column = round((x - low) / span * (room - 1))
        line = round((y - low) / span * (_HEIGHT - 1))
        cells[_HEIGHT - 1 - line][column] = mark

    for column in range(room):
        put(low + span * column / (room - 1), low + span * column / (room - 1), "╱")
    for x, y in picture.points:
        put(x, y, "·")
    for x, y in picture.means:
        put(x, y, "●")
    text = Text()
    for number, line in enumerate(cells):
        value = high - span * number / (_HEIGHT - 1)
        text.append(f"{value:9.2f} ", style="dim")
        for mark in line:
            text.append(mark, style={"●": "bold blue", "╱": "bright_black"}.get(mark, "blue"))
        text.append("\n")
    text.append(_axis(" " * 10, low, high, room))
    text.append(f"across: {picture.x}; up: {picture.y}; ╱ equal; ● means of tenths\n", style="dim")
    return text
