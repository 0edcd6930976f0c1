"""A picture of the main curves of a run."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo_megatron.operations.report.panels import Curve, Panel, Rows, panels_of, series

INK, GREY, FRAME, PAPER = "#1e293b", "#64748b", "#cbd5e1", "#ffffff"
COLORS = ("#2563eb", "#ea7317", "#16a34a", "#7c3aed", "#dc2626", "#0d9488", "#f472b6", "#fbbf24", "#60a5fa", "#a3a3a3")
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
    """One panel for each group of metrics that occurs in `rows` (read_metrics), three beside each other."""
    return draw_panels([(panel, rows) for panel in panels_of(rows)], title)


def draw_panels(drawn: Sequence[tuple[Panel, Rows]], title: str = "") -> Figure:
    """Panels, each with the rows it draws, three beside each other."""
    with matplotlib.rc_context(STYLE):
        lines = max(1, -(-len(drawn) // COLUMNS))
        figure = Figure(figsize=(5.0 * COLUMNS, 3.1 * lines + 0.5), layout="constrained", facecolor=PAPER)
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold")
        for place, (panel, rows) in enumerate(drawn, start=1):
            _draw(figure.add_subplot(lines, COLUMNS, place), panel, rows)
        return figure


def _draw(axes: Axes, panel: Panel, rows: Rows) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.counter.partition("/")[2] or panel.counter, fontsize=8.5, color=GREY)
    if panel.stacked:
        _stack(axes, panel, rows)
    else:
        for curve, color in zip(panel.curves, COLORS, strict=False):
            _line(axes, curve, rows, color)
        _range(axes, panel)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(handles, labels, loc="best", ncols=3 if len(handles) > 4 else 1, handlelength=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.02)


def _line(axes: Axes, curve: Curve, rows: Rows, color: str) -> None:
    steps, values = (np.asarray(part) for part in series(rows, curve.metric))
    half = len(values) // 24
    if curve.points:
        axes.plot(steps, values, color=color, label=curve.label, linestyle="none", marker="D", markersize=4, zorder=5)
    elif curve.smooth and half:
        # The mean over a window of a twelfth of the steps.
        means = [values[max(0, index - half) : index + half + 1].mean() for index in range(len(values))]
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1.0)
        axes.plot(steps, means, color=color, label=curve.label)
    else:
        axes.plot(steps, values, color=color, label=curve.label, marker="o" if len(steps) == 1 else None, markersize=4)
    low, high = series(rows, curve.low)[1], series(rows, curve.high)[1]
    if low and len(low) == len(high) == len(steps):
        if curve.points:
            axes.vlines(steps, low, high, color=color, alpha=0.5, linewidth=1.2)
        else:
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)


def _range(axes: Axes, panel: Panel) -> None:
    if panel.line is not None:
        axes.axhline(panel.line, color=GREY, linewidth=0.8)
    low, high = axes.get_ylim()
    if panel.bottom is not None:
        # An explained variance starts far below zero where a critic is fresh: the axis is cut, not stretched.
        axes.set_ylim(bottom=panel.bottom if panel.bottom == 0 else max(panel.bottom, low))
    if panel.top is not None:
        axes.set_ylim(top=min(panel.top, high) if high > 0 else panel.top)
    if panel.log and any(np.any(np.asarray(line.get_ydata(), dtype=float) > 0) for line in axes.get_lines()):
        axes.set_yscale("log", nonpositive="mask")
    elif high >= 1000:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _stack(axes: Axes, panel: Panel, rows: Rows) -> None:
    timed = [row for row in rows if any(row.get(curve.metric) is not None for curve in panel.curves)]
    timed = [row for row in timed if row["step"] > 0] or timed
    heights = np.array([[row.get(curve.metric) or 0.0 for row in timed] for curve in panel.curves])
    labels = [curve.label for curve in panel.curves]
    axes.stackplot([row["step"] for row in timed], heights, labels=labels, colors=COLORS, alpha=0.85, linewidth=0)
    # Room above for the legend, and no single slow step may flatten all others.
    axes.set_ylim(0, max(1e-3, 1.55 * float(np.percentile(heights.sum(axis=0), 95))))
