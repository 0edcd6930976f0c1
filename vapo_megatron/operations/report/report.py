"""The report of runs: curves.png of each, and one page that needs no other file and no network."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.operations.report.curves import draw_curves
from vapo_megatron.operations.report.panels import panels_of, series
from vapo_megatron.operations.report.runs import Run, read_run
from vapo_megatron.operations.report.summary import alarms_of, number, phases, sentences, summarise

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
            known = panels.setdefault(panel.title, asdict(panel) | {"curves": []})
            known["curves"] += [asdict(curve) for curve in panel.curves if asdict(curve) not in known["curves"]]
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
    found = {name: series(run.rows, name) for name in sorted(metrics)}
    return {
        "name": name,
        "directory": str(run.directory.resolve()),
        "steps": run.rows[-1]["step"] if run.rows else 0,
        "summary": sentences(run),
        "alarms": [asdict(row) for row in alarms_of(run.rows)],
        "series": {name: points for name, points in found.items() if points[0]},
        "sets": list(run.sets.values()),
        "problems": run.problems(),
        "phases": [asdict(row) for row in phases(run.rows)],
        "table": [asdict(row) for row in summarise(run.rows)],
        "samples": run.samples(),
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
