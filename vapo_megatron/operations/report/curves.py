"""A picture of the main curves of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from vapo_megatron.monitoring import names

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[[Axes, Rows], bool]

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2563eb", "#ea7317", "#16a34a", "#dc2626", "#7c3aed", "#64748b"
INK, FRAME, PAPER = "#1e293b", "#cbd5e1", "#ffffff"
PHASES = ("#2563eb", "#60a5fa", "#ea7317", "#fbbf24", "#16a34a", "#7c3aed", "#f472b6", "#64748b", "#0d9488", "#a3a3a3")
COLUMNS = 3
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": FRAME,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw_curves(rows: Rows, title: str = "") -> Figure:
    """One panel for each group of figures that occurs in `rows` (read_metrics), three beside each other."""
    with matplotlib.rc_context(STYLE):
        # Which panels have something to show is known once they are drawn.
        scratch = Figure()
        panels = [panel for panel in PANELS if panel(scratch.add_subplot(), rows)]
        lines = max(1, -(-len(panels) // COLUMNS))
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, hspace=0.03, wspace=0.02)
        figure = Figure(figsize=(5.0 * COLUMNS, 3.1 * lines + 0.5), layout=layout, facecolor=PAPER)
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold")
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(lines, COLUMNS, place)
            axes.set_xlabel("step", fontsize=8.5, color=GREY)
            panel(axes, rows)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.margins(x=0.02)
        return figure


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (or the figure's own counter) and finite values of a figure, [n] each."""
    counter = names.own_counter(name)
    points = [(row.get(counter, row["step"]), row[name]) for row in rows if row.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps, dtype=float), np.asarray(values, dtype=float)


def _line(axes: Axes, rows: Rows, name: str, color: Any, label: str | None = None, **style: Any) -> bool:
    steps, values = _series(rows, name)
    if len(steps):
        style = {"marker": "o" if len(steps) == 1 else None, "markersize": 4} | style
        axes.plot(steps, values, color=color, label=label, **style)
    return len(steps) > 0


def _smooth_line(axes: Axes, rows: Rows, name: str, color: Any, label: str | None = None) -> bool:
    """A noisy figure: faint as it is, and strong as the mean over a window of a twelfth of the steps."""
    steps, values = _series(rows, name)
    half = len(values) // 24
    if half == 0:
        return _line(axes, rows, name, color, label)
    axes.plot(steps, values, color=color, alpha=0.22, linewidth=1.0)
    means = [values[max(0, index - half) : index + half + 1].mean() for index in range(len(values))]
    axes.plot(steps, means, color=color, label=label)
    return True


def _legend(axes: Axes, **where: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, **({"loc": "best"} | where))


def _accuracy(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Accuracy and reward")
    drawn = [_line(axes, rows, names.ACCURACY, BLUE, "accuracy in training")]
    # A reward of 0 or 1 without shaping is the accuracy: one line says it.
    if not drawn[0] or any(row.get(names.REWARD) != row.get(names.ACCURACY) for row in rows):
        drawn.append(_line(axes, rows, names.REWARD, ORANGE, "reward", linewidth=1.2))
    evaluations = sorted({name for row in rows for name in row if name.startswith(names.EVALUATION)})
    accuracies = [name for name in evaluations if "accuracy" in name or "avg@" in name]
    for name, color in zip(accuracies, (GREEN, PURPLE, RED, GREY), strict=False):
        style = {"linestyle": "none", "marker": "D"}
        drawn.append(_line(axes, rows, name, color, name.replace("/", ": "), zorder=5, **style))
    _legend(axes, loc="lower right")
    return any(drawn)


def _length(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Response length (tokens)")
    drawn = _line(axes, rows, names.LENGTH, BLUE, "mean")
    steps, low = _series(rows, names.LENGTH_MIN)
    steps_high, high = _series(rows, names.LENGTH_MAX)
    if len(steps) and np.array_equal(steps, steps_high):
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="min to max")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return drawn


def _entropy(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Policy entropy (nats per token)")
    drawn = _line(axes, rows, names.ENTROPY, PURPLE)
    axes.set_ylim(bottom=0)
    return drawn


def _value_loss(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Value loss")
    drawn = _line(axes, rows, names.VALUE_LOSS, ORANGE)
    axes.set_ylim(bottom=0)
    return drawn


def _explained_variance(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Explained variance of the value model")
    drawn = _line(axes, rows, names.EXPLAINED_VARIANCE, GREEN)
    _focus(axes, rows, names.EXPLAINED_VARIANCE)
    return drawn


def _focus(axes: Axes, rows: Rows, name: str) -> None:
    """Explained variance starts far below zero where a value model is fresh: show [-1, 1] of it."""
    _, values = _series(rows, name)
    if len(values):
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_ylim(max(-1.0, min(-0.05, float(values.min()) - 0.05)), 1.02)


def _bias(axes: Axes, rows: Rows, prefix: str) -> bool:
    drawn = []
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(names.BIAS_POSITIONS)))
    for position, shade in zip(names.BIAS_POSITIONS, shades, strict=True):
        drawn.append(_smooth_line(axes, rows, f"{prefix}{position}", shade, f"{position} %"))
    axes.axhline(0, color=GREY, linewidth=0.8)
    _legend(axes, ncols=len(names.BIAS_POSITIONS), handlelength=1.0, columnspacing=0.9)
    return any(drawn)


def _value_bias(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Value − return, by position in the response")
    return _bias(axes, rows, names.VALUE_BIAS)


def _divergence(axes: Axes, rows: Rows) -> bool:
    axes.set_title("KL to the rollout policy, clip fractions")
    drawn = [
        _smooth_line(axes, rows, names.TRAIN_INFER_KL, BLUE, "KL (nats)"),
        _smooth_line(axes, rows, names.CLIP_HIGH, ORANGE, "clipped high"),
        _smooth_line(axes, rows, names.CLIP_LOW, GREEN, "clipped low"),
    ]
    return _logarithmic(axes, drawn)


def _grad_norms(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Gradient norms")
    drawn = [
        _smooth_line(axes, rows, names.ACTOR_GRAD_NORM, BLUE, "actor"),
        _smooth_line(axes, rows, names.CRITIC_GRAD_NORM, ORANGE, "critic"),
    ]
    return _logarithmic(axes, drawn)


def _logarithmic(axes: Axes, drawn: Sequence[bool]) -> bool:
    if any(np.any(np.asarray(line.get_ydata(), dtype=float) > 0) for line in axes.get_lines()):
        axes.set_yscale("log", nonpositive="mask")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 50 * low else (1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes, ncols=3, handlelength=1.2)
    return any(drawn)


def _phases(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Time per phase (seconds per step)")
    timed = [
        row for row in rows if row.get(names.STEP_TIME) is not None and names.own_counter(names.PRETRAINING) not in row
    ]
    found = dict.fromkeys(name for row in timed for name in row if name.startswith(names.TIME))
    # What runs now and then (an evaluation, a checkpoint) would only be spikes that flatten all else.
    phases = [name for name in found if name != names.STEP_TIME and 2 * sum(name in row for row in timed) >= len(timed)]
    if not phases:
        return False
    heights = np.array([[row.get(name) or 0.0 for row in timed] for name in phases])
    order = np.argsort(-heights.sum(axis=1), kind="stable")[: len(PHASES)]
    steps = [row["step"] for row in timed]
    labels = [phases[index].removeprefix(names.TIME).replace("_", " ") for index in order]
    axes.stackplot(steps, heights[order], labels=labels, colors=PHASES, alpha=0.85, linewidth=0)
    # Room above for the legend, and no single slow step may flatten all others.
    axes.set_ylim(0, max(1e-3, 1.55 * float(np.percentile(heights.sum(axis=0), 95))))
    _legend(axes, loc="upper left", ncols=3, handlelength=0.9, columnspacing=1.0)
    return True


def _throughput(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Tokens per second")
    drawn = _line(axes, rows, names.TOKENS_PER_SECOND, BLUE)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return drawn


def _pretraining(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Value pretraining: loss and explained variance")
    drawn = [
        _line(axes, rows, names.PRETRAINING + "value_loss", ORANGE, "value loss"),
        _line(axes, rows, names.PRETRAINING + "explained_variance", GREEN, "explained variance"),
    ]
    _focus(axes, rows, names.PRETRAINING + "explained_variance")
    axes.set_xlabel("pretraining step")
    _legend(axes)
    return any(drawn)


def _pretraining_bias(axes: Axes, rows: Rows) -> bool:
    axes.set_title("Value pretraining: value − return, by position")
    axes.set_xlabel("pretraining step")
    return _bias(axes, rows, names.PRETRAINING + "value_bias_")


PANELS: tuple[Draw, ...] = (
    _accuracy,
    _length,
    _entropy,
    _value_loss,
    _explained_variance,
    _value_bias,
    _divergence,
    _grad_norms,
    _phases,
    _throughput,
    _pretraining,
    _pretraining_bias,
)
