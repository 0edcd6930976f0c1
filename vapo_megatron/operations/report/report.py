"""The report of a run: curves.png and a report.html that needs no other file."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import ALARMS
from vapo_megatron.monitoring.metrics import METRICS_FILE, read_metrics
from vapo_megatron.operations.report.curves import draw_curves

DPI = 110

# Metrics of the table, and which of their values is the best: the largest, the smallest, or none in particular.
TABLE: tuple[tuple[str, str], ...] = (
    (names.ACCURACY, "max"),
    (names.REWARD, "max"),
    (names.LENGTH, ""),
    (names.TRUNCATED, "min"),
    (names.FRAC_ZERO_STD_GROUPS, ""),
    (names.ENTROPY, ""),
    (names.VALUE_LOSS, "min"),
    (names.EXPLAINED_VARIANCE, "max"),
    (names.TRAIN_INFER_KL, "min"),
    (names.TRAIN_INFER_KL_MAX, "min"),
    (names.ACTOR_GRAD_NORM, ""),
    (names.CRITIC_GRAD_NORM, ""),
    (names.TOKENS_PER_SECOND, "max"),
    (names.STEP_TIME, "min"),
)


@dataclass(frozen=True)
class TableRow:
    """A metric's first, best and last value and the steps they were reached at; best is empty where none is."""

    name: str
    first: str
    best: str
    last: str


@dataclass(frozen=True)
class AlarmRow:
    """An alarm that went off; steps: in how many, from which one to which."""

    name: str
    steps: str
    meaning: str
    remedy: str


def write_report(run_dir: Path) -> Path:
    """Write run_dir/curves.png and run_dir/report.html from the files in run_dir, and return the latter.

    Reads metrics.jsonl, and config.yaml, evaluation.json and environment.json where they are there; any run may be
    reported on, one that goes on still too. Raises BadInput where there are no metrics, or a file cannot be read.
    """
    if not run_dir.is_dir():
        raise BadInput(f"{run_dir}: no such run directory")
    rows = read_metrics(run_dir)
    if not rows:
        raise BadInput(f"{run_dir / METRICS_FILE}: no step in it; report on a run that has finished a step")
    picture = io.BytesIO()
    draw_curves(rows, run_dir.name).savefig(picture, format="png", dpi=DPI)
    with atomic_write(run_dir / "curves.png", "wb") as file:
        file.write(picture.getvalue())
    templates = Environment(
        loader=PackageLoader("vapo_megatron.operations.report"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
    )
    config = run_dir / "config.yaml"
    page = templates.get_template("report.html.j2").render(
        title=run_dir.resolve().name,
        directory=str(run_dir.resolve()),
        steps=rows[-1]["step"],
        alarms=alarms_of(rows),
        table=summarise(rows),
        evaluation=_flat(_read_json(run_dir / "evaluation.json")),
        environment=_flat(_read_json(run_dir / "environment.json")),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        curves=base64.b64encode(picture.getvalue()).decode(),
    )
    path = run_dir / "report.html"
    with atomic_write(path) as file:
        file.write(page)
    return path


def alarms_of(rows: Sequence[Mapping[str, Any]]) -> list[AlarmRow]:
    """The alarms that went off, in the order of docs/alarms.md."""
    table = []
    for alarm in ALARMS:
        steps = [row["step"] for row in rows if row.get(names.ALARM + alarm.name)]
        if steps:
            span = f"{len(steps)}: {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
            table.append(AlarmRow(alarm.name, span, alarm.meaning, alarm.remedy))
    return table


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """First, best and last of the main metrics and of every evaluation; metrics that never occur are left out."""
    evaluations = sorted({name for row in rows for name in row if name.startswith(names.EVALUATION)})
    table = []
    for name, best in (*((name, "max") for name in evaluations), *TABLE):
        points = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
        if not points:
            continue
        choose = {"max": max, "min": min}.get(best)
        # The first of equal values: when it was reached.
        top = _at_step(choose(points, key=lambda point: point[1])) if choose else ""
        table.append(TableRow(name, _at_step(points[0]), top, _at_step(points[-1])))
    return table


def _at_step(point: tuple[int, float]) -> str:
    return f"{_number(point[1])} (step {point[0]})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _read_json(path: Path) -> Any:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error}); mend or remove it") from error


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and texts of everything in nested mappings and lists."""
    if isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [row for key, entry in entries for row in _flat(entry, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, float) and math.isfinite(value):
        return [(prefix, _number(value))]
    return [(prefix, "-" if value is None else str(value))]
