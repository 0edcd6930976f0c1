"""The report of runs: one page that needs no other file and no network."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vapo_megatron.config.run_directory import PROFILE
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.metrics import LAST_STEPS, mean_of_last
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import ALARMS
from vapo_megatron.monitoring.metrics import totals
from vapo_megatron.monitoring.pictures import as_data
from vapo_megatron.operations.report.compare import compare_runs, shown_p_value
from vapo_megatron.operations.report.panels import Rows, panels_of, series
from vapo_megatron.operations.report.runs import Run, read_run

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("charts.js", "pictures.js", "samples.js", "page.js")


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs, evaluations and unfinished runs included; returns its path.

    out: where to write the page; None: report.html in the run's directory, or in the current one
    for several runs. Raises BadInput if a run has nothing to report on, or a file cannot be read.
    """
    runs = [read_run(directory) for directory in directories]
    path = out or (runs[0].directory if len(runs) == 1 else Path()) / "report.html"
    with atomic_write(path) as file:
        file.write(page(runs))
    return path


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The page as HTML. live: it asks its server for the state of the runs every few seconds."""
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
    """The data of the page, for JSON: panels with the curves that any run has, and the runs."""
    panels: dict[str, dict[str, Any]] = {}
    for run in runs:
        for panel in panels_of(run.rows):
            entry = panels.setdefault(panel.title, asdict(panel) | {"curves": []})
            entry["curves"] += [
                asdict(curve) for curve in panel.curves if asdict(curve) not in entry["curves"]
            ]
    metrics = {names.STEP_TIME}
    curves = [curve for panel in panels.values() for curve in panel["curves"]]
    metrics |= {
        curve[part] for curve in curves for part in ("metric", "low", "high") if curve[part]
    }
    return {
        "panels": list(panels.values()),
        "comparisons": [row for run in runs[1:] for row in _compared(runs[0], run)],
        "runs": [
            _run_content(run, name, metrics) for run, name in zip(runs, _names(runs), strict=True)
        ],
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of the runs' directories, or their whole paths if two names are equal."""
    short = [run.name for run in runs]
    if len(set(short)) == len(short):
        return short
    return [str(run.directory) for run in runs]


def _compared(first: Run, second: Run) -> list[dict[str, Any]]:
    """The last evaluations of two runs, problem by problem; nothing where they have no set in
    common."""
    try:
        comparisons = compare_runs(first.directory, second.directory)
    except BadInput:
        return []
    pair = {"first": first.name, "second": second.name}
    return [
        pair | asdict(row) | {"p": shown_p_value(row.p_value), "picture": as_data(row.picture)}
        for row in comparisons
    ]


def _run_content(run: Run, name: str, metrics: set[str]) -> dict[str, Any]:
    curves = {name: series(run.rows, name) for name in sorted(metrics)}
    return {
        "name": name,
        "directory": str(run.directory.resolve()),
        "steps": run.rows[-1]["step"] if run.rows else 0,
        "headline": headline(run),
        "facts": run.facts(),
        "alarms": alarms_of(run.rows),
        "series": {name: points for name, points in curves.items() if points[0]},
        "sets": list(run.sets.values()),
        "problems": run.problems(),
        "phases": phases(run.rows),
        "pictures": list(map(as_data, run.pictures())),
        "samples": run.samples(),
        "traces": sorted(path.name for path in (run.directory / PROFILE).glob("step_*")),
        "environment": json.dumps(run.environment, indent=2),
        "config": run.config,
    }


def alarms_of(rows: Rows) -> list[dict[str, str]]:
    """The alarms that went off, in the order of docs/alarms.md; steps: in how many, from which one
    to which."""
    table = []
    for alarm in ALARMS:
        steps = [row["step"] for row in rows if row.get(names.ALARM + alarm.name)]
        if steps:
            span = f"{len(steps)}: {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
            table.append(
                {
                    "name": alarm.name,
                    "steps": span,
                    "meaning": alarm.meaning,
                    "remedy": alarm.remedy,
                }
            )
    return table


def phases(rows: Rows) -> list[dict[str, Any]]:
    """Every phase, the longest first: seconds, share of all phases' seconds, peak memory in GiB by
    gauge."""
    timed = [row for row in rows if row["step"] > 0]
    present = set[str]().union(*timed)
    metrics = {name for name in present if name.startswith(names.TIME)} - {names.STEP_TIME}
    seconds = {metric: sum(row.get(metric) or 0.0 for row in timed) for metric in metrics}
    total = sum(seconds.values())
    shares = []
    for metric in sorted(metrics, key=lambda metric: -seconds[metric]):
        phase = metric.removeprefix(names.TIME)
        gauges = sorted(name for name in present if name.endswith(f"/{phase}_gib"))
        peaks = {
            name.partition("/")[0]: max(row.get(name) or 0.0 for row in timed) for name in gauges
        }
        row = {"name": phase.replace("_", " "), "seconds": seconds[metric], "peaks": peaks}
        shares.append(row | {"share": seconds[metric] / total if total else 0.0})
    return shares


Figure = tuple[str, str, str]
"""Label, figure, remark."""


def headline(run: Run) -> list[Figure]:
    """The figures at the top of the page."""
    figures = [
        *_evaluation_figures(run),
        *_accuracy_figure(run),
        *_critic_figure(run),
        *_steps_figure(run),
    ]
    if longest := phases(run.rows)[:1]:
        figures.append(("longest phase", f"{longest[0]['share']:.0%}", longest[0]["name"]))
    if run.rows:
        alarms = [alarm["name"].replace("_", " ") for alarm in alarms_of(run.rows)]
        figures.append(("alarms", str(len(alarms) or "none"), ", ".join(alarms)))
    return figures


def _evaluation_figures(run: Run) -> Iterator[Figure]:
    for name, entry in run.sets.items():
        steps, averages = series(run.rows, f"{names.EVALUATION}{name}_avg@{entry['samples']}")
        if len(averages) > 1:
            when = f"after step {steps[0]:.0f}" if steps[0] else "before training"
            before = f", {when} {averages[0]:.3f}"
        else:
            before = ""
        interval = (
            f"95 % interval {entry['low']:.3f} to {entry['high']:.3f}, {entry['problems']} "
            f"problems{before}"
        )
        yield f"{name}, avg@{entry['samples']}", f"{entry['avg_at_k']:.3f}", interval


def _accuracy_figure(run: Run) -> Iterator[Figure]:
    if accuracy := series(run.rows, names.ACCURACY)[1]:
        tenth = max(1, len(accuracy) // 10)
        first = fmean(accuracy[:tenth])
        last = fmean(accuracy[-tenth:])
        yield "accuracy in training", f"{last:.3f}", f"last tenth of steps; first {first:.3f}"


def _critic_figure(run: Run) -> Iterator[Figure]:
    critic, group, position = (
        series(run.rows, name)[1]
        for name in (names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION)
    )
    if critic:
        mean, _, half = mean_of_last(critic).partition(" ± ")
        remark = (
            f"{half and f'± {half} '}of the variance of returns, last "
            f"{min(len(critic), LAST_STEPS)} steps"
        )
        if group and position:
            remark += f"; the mean of the other responses {mean_of_last(group)}"
            remark += f", position alone {mean_of_last(position)}"
        yield "the critic explains", mean, remark


def _steps_figure(run: Run) -> Iterator[Figure]:
    steps = [row for row in run.rows if row["step"] > 0]
    if steps:
        planned = run.settings.get("run")
        if isinstance(planned, dict):
            total = planned.get("steps")
        else:
            total = None
        cost = totals(run.rows)
        seconds = 3600 * cost.hours or sum(row.get(names.STEP_TIME) or 0.0 for row in steps)
        size = f"in {duration(seconds)}"
        if cost.gpu_hours:
            size += f", {cost.gpu_hours:,.1f} GPU-hours"
        if cost.tokens:
            size += f", {cost.tokens:,.0f} response tokens"
        yield (
            "steps",
            f"{steps[-1]['step']}{f' of {total}' if isinstance(total, int) else ''}",
            size,
        )


def duration(seconds: float) -> str:
    """A time in days, hours, minutes or seconds."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


HOST = "127.0.0.1"


def make_server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the page (/) and its data (/data.json), read again for every request; port 0: a
    free one.

    Raises BadInput where a run has nothing to report on yet, or the port is taken.
    """
    for directory in directories:
        read_run(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Against DNS rebinding: only requests under this machine's local names are answered.
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                return self.send_error(403)
            is_page = self.path.partition("?")[0] == "/"
            if not is_page and self.path != "/data.json":
                return self.send_error(404)
            try:
                runs = [read_run(directory) for directory in directories]
            except (BadInput, OSError) as error:
                return self.send_error(503, explain=str(error))
            body = (page(runs, live=True) if is_page else json.dumps(content(runs))).encode()
            self.send_response(200)
            self.send_header(
                "Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8"
            )
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
        raise BadInput(
            f"--port {port}: cannot be listened on ({error.strerror}); give another one"
        ) from error


def serve(directories: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C."""
    with make_server(directories, port) as server, suppress(KeyboardInterrupt):
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
