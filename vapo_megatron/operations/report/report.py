"""The report of runs: one page that needs no other file and no network."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.run_directory import PROFILE
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names
from vapo_megatron.operations.compare import compare_runs, shown_p_value
from vapo_megatron.operations.report.panels import panels_of, series
from vapo_megatron.operations.report.runs import Run, read_run
from vapo_megatron.operations.report.summary import alarms_of, headline, number, phases, summarise

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("charts.js", "samples.js", "page.js")


def write_report(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs; its path.

    Any run may be reported on, an evaluation and one that goes on still too. out: where the page goes, as of runs of
    other people; None: report.html in the run's directory, of several runs in the current one. Raises BadInput where a
    run has nothing to report on, or a file cannot be read.
    """
    runs = [read_run(directory) for directory in directories]
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
        "comparisons": [row for run in runs[1:] for row in _compared(runs[0], run)],
        "runs": [_run_content(run, name, metrics) for run, name in zip(runs, _names(runs), strict=True)],
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """Names that tell runs apart: those of their directories, where two are alike the whole paths."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.directory) for run in runs]


def _compared(first: Run, second: Run) -> list[dict[str, Any]]:
    """The last evaluations of two runs, problem by problem; nothing where they have no set in common."""
    try:
        comparisons = compare_runs(first.directory, second.directory)
    except BadInput:
        return []
    pair = {"first": first.name, "second": second.name}
    return [pair | asdict(row) | {"p": shown_p_value(row.p_value)} for row in comparisons]


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
        "table": summarise(run.rows),
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
            self.send_header("Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8")
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
    with make_server(directories, port) as server, suppress(KeyboardInterrupt):
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
