"""The metrics: accuracy of every row, the collapse of the length, and what lambda does to a reward that comes late."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.gridspec import GridSpec
from matplotlib.metric import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from reward_decay import LEARNT, SETTINGS, Course
from table import RowResult, Table

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.operations.report.curves import BLUE, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, RED, STYLE

DPI = 150
PART_COLORS = {"ablation": BLUE, "family": GREEN, "collapse": ORANGE}
# The runs whose lengths are shown: what collapses and what mends it.
LENGTHS = {
    "ppo": RED,
    "without_value_pretraining": ORANGE,
    "ppo_value_pretraining": PURPLE,
    "vc_ppo": GREEN,
    "vapo": BLUE,
}
# With lambda_critic = 1 the value targets are the returns themselves.
CRITICS = {"without_value_pretraining": ("from the reward model", RED), "vapo": ("after value pretraining", GREEN)}
DECAY_COLORS = (RED, ORANGE, GREEN, BLUE)


def save_ablation_figure(table: Table, path: Path) -> None:
    """Accuracy of every row with all its seeds; response length by step; bias of the critics that runs start from."""
    with matplotlib.rc_context(STYLE):
        rows = len(table.rows) + len({result.row.part for result in table.rows}) - 1
        metric = _figure(14.0, max(7.0, 1.5 + 0.4 * rows))
        grid = GridSpec(2, 2, metric=metric, width_ratios=(1.35, 1.0), height_ratios=(1.25, 1.0))
        _accuracies(metric.add_subplot(grid[:, 0]), table)
        _lengths(metric.add_subplot(grid[0, 1]), table)
        _critics(metric.add_subplot(grid[1, 1]), table)
        _save(metric, path)


def save_decay_figure(courses: Sequence[Course], path: Path) -> None:
    """Chance of the good token by iteration, time to learn by delay, and the value error along the response."""
    with matplotlib.rc_context(STYLE):
        metric = _figure(14.0, 4.3)
        grid = GridSpec(1, 3, metric=metric)
        longest = max(course.tokens for course in courses)
        late = [course for course in courses if course.tokens == longest]
        _chances(metric.add_subplot(grid[0]), late)
        _delays(metric.add_subplot(grid[1]), courses)
        _value_errors(metric.add_subplot(grid[2]), late)
        handles, labels = metric.axes[0].get_legend_handles_labels()
        metric.legend(handles, labels, loc="outside lower center", ncols=len(SETTINGS), fontsize=9.5)
        _save(metric, path)


def _figure(width: float, height: float) -> Figure:
    metric = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    metric.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(metric)
    return metric


def _save(metric: Figure, path: Path) -> None:
    with atomic_write(path, "wb") as file:
        metric.savefig(file, format="png", dpi=DPI)


def _accuracies(axes: Axes, table: Table) -> None:
    axes.set_title(f"Accuracy on unseen problems after {table.steps} steps")
    place, places, part = 0.0, [], table.rows[0].row.part
    for result in table.rows:
        if result.row.part != part:
            place, part = place + 0.7, result.row.part
        places.append(place)
        _seeds(axes, place, result)
        place += 1.0
    axes.set_yticks(places, [result.row.title for result in table.rows], color=INK)
    axes.set_ylim(place - 0.3, -0.7)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.set_xlim(0, 1.13)
    axes.set_xticks(np.arange(0, 1.01, 0.2))
    axes.set_xlabel("avg@4; a dot for each seed, the bar is their mean", color=GREY)
    if table.start:
        start = mean(table.start.values())
        axes.axvline(start, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate("cold start", (start, place - 0.4), (4, 0), textcoords="offset points", fontsize=8.5, color=GREY)


def _seeds(axes: Axes, place: float, result: RowResult) -> None:
    color, finals = PART_COLORS[result.row.part], result.finals
    axes.barh(place, mean(finals), height=0.62, color=color, alpha=0.20, linewidth=0, zorder=2)
    axes.plot([mean(finals)] * 2, [place - 0.31, place + 0.31], color=color, linewidth=2.4, zorder=3)
    axes.plot([min(finals), max(finals)], [place, place], color=color, linewidth=1.2, alpha=0.7, zorder=3)
    axes.plot(finals, [place] * len(finals), "o", color=color, markersize=5.5, markeredgecolor=PAPER, zorder=4)
    axes.annotate(f"{mean(finals):.2f}", (1.06, place), ha="left", va="center", fontsize=10, color=INK)


def _lengths(axes: Axes, table: Table) -> None:
    axes.set_title("Tokens of a response")
    for name, color in LENGTHS.items():
        result = table.of(name)
        if result is None:
            continue
        lengths = np.array([found.length for found in result.seeds.values()])
        _band(axes, np.arange(1, lengths.shape[1] + 1), lengths, color, result.row.title)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step; mean over seeds, least to most", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.legend(loc="best", fontsize=9)


def _critics(axes: Axes, table: Table) -> None:
    axes.set_title("Critics at the first step: value − return")
    for name, (label, color) in CRITICS.items():
        result = table.of(name)
        biases = [found.value_bias for found in result.seeds.values() if found.value_bias] if result else []
        if biases:
            positions = sorted(biases[0])
            values = np.array([[bias[position] for position in positions] for bias in biases])
            _band(axes, np.array(positions), values, color, label, marker="o", markersize=4)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xlabel("percent of the response", color=GREY)
    axes.legend(loc="best", fontsize=9)


def _band(axes: Axes, x: np.ndarray, values: np.ndarray, color: str, label: str, **style: Any) -> None:
    """Mean of [seeds, n] as a line, least to most as a shade."""
    axes.plot(x, values.mean(axis=0), color=color, label=label, **style)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)


def _chances(axes: Axes, courses: Sequence[Course]) -> None:
    axes.set_title(f"Chance of the good token, {courses[0].tokens} tokens")
    for course, color in zip(courses, DECAY_COLORS, strict=True):
        chance = np.array(course.chance)
        _band(axes, np.arange(chance.shape[1]), chance, color, course.setting, **_overlaid(course))
    axes.axhline(LEARNT, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("iteration; mean over seeds, least to most", color=GREY)


def _delays(axes: Axes, courses: Sequence[Course]) -> None:
    axes.set_title(f"Iterations until that chance is {LEARNT:g}")
    for setting, color in zip(SETTINGS, DECAY_COLORS, strict=True):
        alike = [course for course in courses if course.setting == setting.name]
        known = [(c.tokens, [n for n in c.learnt_after() if n is not None]) for c in alike]
        known = [(tokens, found) for tokens, found in known if found]
        tokens = [delay for delay, _ in known]
        axes.plot(tokens, [median(f) for _, f in known], marker="o", color=color, markersize=4.5, **_overlaid(alike[0]))
        axes.fill_between(
            tokens, [min(f) for _, f in known], [max(f) for _, f in known], color=color, alpha=0.15, linewidth=0
        )
    axes.set_xscale("log")
    delays = sorted({course.tokens for course in courses})
    axes.set_xticks(delays, [str(delay) for delay in delays])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens until the reward", color=GREY)


def _value_errors(axes: Axes, courses: Sequence[Course]) -> None:
    axes.set_title(f"Error of the values after {courses[0].measured_at} iterations")
    for course, color in zip(courses, DECAY_COLORS, strict=True):
        axes.plot(range(1, len(course.value_error) + 1), course.value_error, color=color, **_overlaid(course))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("token of a response that began well", color=GREY)


def _overlaid(course: Course) -> dict[str, Any]:
    """The last setting runs on top of the one before it: drawn dashed, both are seen."""
    return {"linestyle": (0, (3, 2))} if course.setting == SETTINGS[-1].name else {}
