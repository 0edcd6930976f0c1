"""The report of runs: curves.png of each, and one page that needs no other file and no network."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.run_directory import PROFILE
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names
from vapo_megatron.operations.report.panels import Curve, Panel, Rows, panels_of, series
from vapo_megatron.operations.report.runs import Run, read_run
from vapo_megatron.operations.report.summary import alarms_of, number, phases, sentences, summarise

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


DPI = 110
_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("charts.js", "samples.js", "page.js")


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs, and curves.png into the directory of each; the page's path.

    Any run may be reported on, an evaluation and one that goes on still too. out: this page alone is written, as of
    runs of other people; None: report.html in the run's directory, of several runs in the current one. Raises BadInput
    where a run has nothing to report on, or a file cannot be read.
    """
    runs = [read_run(directory) for directory in directories]
    for run in runs if out is None else ():
        if run.rows:
            picture = io.BytesIO()
            draw_curves(run.rows, run.name).savefig(picture, format="png", dpi=DPI)
            with atomic_write(run.directory / "curves.png", "wb") as file:
                file.write(picture.getvalue())
    path = out or (runs[0].directory if len(runs) == 1 else Path()) / "report.html"
    with atomic_write(path) as file:
        file.write(page(runs))
    return path


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The page. live: it asks its server for the state of the runs from time to time."""
    templates = Environment(
        loader=PackageLoader("vapo_megatron.operations.report"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
    )
    return templates.get_template("report.html.j2").render(
        title=" · ".join(_names(runs)),
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        scripts=[(_TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS],
        # Nothing that a run holds, a response above all, may end the element that it stands in.
        data=json.dumps(content(runs), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        live=live,
    )


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows, for JSON: panels with the curves that any of the runs has, and the runs."""
    panels: dict[str, dict[str, Any]] = {}
    for run in runs:
        for panel in panels_of(run.rows):
            entry = panels.setdefault(panel.title, asdict(panel) | {"curves": []})
            entry["curves"] += [asdict(curve) for curve in panel.curves if asdict(curve) not in entry["curves"]]
    metrics = {names.STEP_TIME}
    curves = [curve for panel in panels.values() for curve in panel["curves"]]
    metrics |= {curve[part] for curve in curves for part in ("metric", "low", "high") if curve[part]}
    return {
        "panels": list(panels.values()),
        "runs": [_run_content(run, name, metrics) for run, name in zip(runs, _names(runs), strict=True)],
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """Names that tell runs apart: those of their directories, where two are alike the whole paths."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.directory) for run in runs]


def _run_content(run: Run, name: str, metrics: set[str]) -> dict[str, Any]:
    curves = {name: series(run.rows, name) for name in sorted(metrics)}
    return {
        "name": name,
        "directory": str(run.directory.resolve()),
        "steps": run.rows[-1]["step"] if run.rows else 0,
        "summary": sentences(run),
        "alarms": [asdict(row) for row in alarms_of(run.rows)],
        "series": {name: points for name, points in curves.items() if points[0]},
        "sets": list(run.sets.values()),
        "problems": run.problems(),
        "phases": [asdict(row) for row in phases(run.rows)],
        "table": [asdict(row) for row in summarise(run.rows)],
        "samples": run.samples(),
        "traces": sorted(path.name for path in (run.directory / PROFILE).glob("step_*")),
        "environment": _flat(run.environment),
        "config": run.config,
    }


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and texts of everything in nested mappings and lists."""
    if isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [row for key, entry in entries for row in _flat(entry, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, float) and math.isfinite(value):
        return [(prefix, number(value))]
    return [(prefix, "-" if value is None else str(value))]


HOST = "127.0.0.1"


def make_server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the page (/) and of what it shows (/data.json), read anew for every request; port 0: a free one.

    Raises BadInput where a run has nothing to report on yet, or the port is taken.
    """
    for directory in directories:
        read_run(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page elsewhere may point a name of its own at this machine: only this machine's names are answered.
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                self.send_error(403)
                return
            try:
                runs = [read_run(directory) for directory in directories]
            except (BadInput, OSError) as error:
                self.send_error(503, explain=str(error))
                return
            path = self.path.partition("?")[0]
            if path == "/":
                self._send(page(runs, live=True), "text/html")
            elif path == "/data.json":
                self._send(json.dumps(content(runs)), "application/json")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            with suppress(ConnectionError):  # the browser has left
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a page that follows a run asks every few seconds."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise BadInput(f"--port {port}: cannot be listened on ({error.strerror}); give another one") from error


def serve(directories: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C."""
    with make_server(directories, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
