"""What a run's metrics say, in sentences and in a table."""

from collections.abc import Sequence
from typing import Any

from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import ALARMS
from vapo_megatron.operations.report.panels import Rows, series
from vapo_megatron.operations.report.runs import Run


def alarms_of(rows: Rows) -> list[dict[str, str]]:
    """The alarms that went off, in the order of docs/alarms.md; steps: in how many, from which one to which."""
    table = []
    for alarm in ALARMS:
        steps = [row["step"] for row in rows if row.get(names.ALARM + alarm.name)]
        if steps:
            span = f"{len(steps)}: {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
            table.append({"name": alarm.name, "steps": span, "meaning": alarm.meaning, "remedy": alarm.remedy})
    return table


def summarise(rows: Rows) -> list[tuple[str, str, str, str]]:
    """Name, first, best and last of every evaluation, of accuracy and reward; those that never occur are left out."""
    present = set[str]().union(*rows)
    evaluations = {name for name in present if name.startswith(names.EVALUATION) and "@" in name}
    table = []
    for name in (*sorted(evaluations), names.ACCURACY, names.REWARD):
        points = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
        if points:
            # The first of equal values: when it was reached.
            best = max(points, key=lambda point: point[1])
            first, most, last = map(_at_step, (points[0], best, points[-1]))
            table.append((name, first, most, last))
    return table


def phases(rows: Rows) -> list[dict[str, Any]]:
    """Every phase, the longest first: seconds, their share of all phases' seconds, highest memory in GiB by gauge."""
    timed = [row for row in rows if row["step"] > 0]
    present = set[str]().union(*timed)
    metrics = {name for name in present if name.startswith(names.TIME)} - {names.STEP_TIME}
    seconds = {metric: sum(row.get(metric) or 0.0 for row in timed) for metric in metrics}
    total = sum(seconds.values())
    shares = []
    for metric in sorted(metrics, key=lambda metric: -seconds[metric]):
        phase = metric.removeprefix(names.TIME)
        gauges = sorted(name for name in present if name.endswith(f"/{phase}_gib"))
        peaks = {name.partition("/")[0]: max(row.get(name) or 0.0 for row in timed) for name in gauges}
        row = {"name": phase.replace("_", " "), "seconds": seconds[metric], "peaks": peaks}
        shares.append(row | {"share": seconds[metric] / total if total else 0.0})
    return shares


def headline(run: Run) -> list[tuple[str, str, str]]:
    """What somebody who knows nothing of the run should see first: label, figure, what stands beside it."""
    figures = []
    for name, entry in run.sets.items():
        first = series(run.rows, f"{names.EVALUATION}{name}_avg@{entry['samples']}")[1]
        before = f", before training {first[0]:.3f}" if len(first) > 1 else ""
        interval = f"95 % interval {entry['low']:.3f} to {entry['high']:.3f}, {entry['problems']} problems{before}"
        figures.append((f"{name}, avg@{entry['samples']}", f"{entry['avg_at_k']:.3f}", interval))
    accuracy, critic, group, position = (
        _ends(series(run.rows, name)[1])
        for name in (names.ACCURACY, names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION)
    )
    if accuracy is not None:
        figures.append(("accuracy in training", f"{accuracy[1]:.3f}", f"last tenth of steps; first {accuracy[0]:.3f}"))
    if critic is not None:
        free = "of the variance of returns, last tenth"
        if group is not None and position is not None:
            free += f"; for free {max(group[1], position[1], 0.0):.0%}"
        figures.append(("the critic explains", f"{critic[1]:.0%}", free))
    steps = [row for row in run.rows if row["step"] > 0]
    if steps:
        planned = run.settings.get("run")
        total = planned.get("steps") if isinstance(planned, dict) else None
        seconds = sum(row.get(names.STEP_TIME) or 0.0 for row in steps)
        tokens = sum(row.get("rollout/tokens") or 0.0 for row in steps)
        size = f"in {duration(seconds)}" + (f", {tokens:,.0f} response tokens" if tokens else "")
        figures.append(("steps", f"{steps[-1]['step']}{f' of {total}' if isinstance(total, int) else ''}", size))
    if longest := phases(run.rows)[:1]:
        figures.append(("longest phase", f"{longest[0]['share']:.0%}", longest[0]["name"]))
    if run.rows:
        alarms = [alarm["name"].replace("_", " ") for alarm in alarms_of(run.rows)]
        figures.append(("alarms", str(len(alarms) or "none"), ", ".join(alarms)))
    return figures


def _ends(values: Sequence[float]) -> tuple[float, float] | None:
    """The means of the first and of the last tenth."""
    if not values:
        return None
    part = max(1, len(values) // 10)
    return sum(values[:part]) / part, sum(values[-part:]) / part


def duration(seconds: float) -> str:
    """In the unit that fits."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def _at_step(point: tuple[int, float]) -> str:
    return f"{number(point[1])} (step {point[0]})"


def number(value: float) -> str:
    """Four digits, or whole from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
