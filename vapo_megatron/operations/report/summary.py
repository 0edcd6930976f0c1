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


def sentences(run: Run) -> list[str]:
    """What somebody who knows nothing of the run should be told first."""
    parts = [_size(run), *_evaluations(run), _training(run), _critic(run), _time(run)]
    if run.rows:
        alarms = [alarm["name"].replace("_", " ") for alarm in alarms_of(run.rows)]
        parts.append(f"Alarms: {', '.join(alarms)}." if alarms else "No alarm went off.")
    return [sentence for sentence in parts if sentence]


def _size(run: Run) -> str:
    steps = [row for row in run.rows if row["step"] > 0]
    if not steps:
        return ""
    algorithm = str(run.settings.get("preset") or "").upper().replace("_", " ")
    section = run.settings.get("run")
    planned = section.get("steps") if isinstance(section, dict) else None
    of = f" of {planned}" if isinstance(planned, int) and planned != steps[-1]["step"] else ""
    seconds = sum(row.get(names.STEP_TIME) or 0.0 for row in steps)
    tokens = sum(row.get("rollout/tokens") or 0.0 for row in steps)
    size = f"{steps[-1]['step']}{of} steps{' of ' + algorithm if algorithm else ''} in {duration(seconds)}"
    return f"{size}, on {tokens:,.0f} response tokens." if tokens else f"{size}."


def _evaluations(run: Run) -> list[str]:
    lines = []
    for name, entry in run.sets.items():
        first = series(run.rows, f"{names.EVALUATION}{name}_avg@{entry['samples']}")[1]
        before = f" (before training {first[0]:.3f})" if len(first) > 1 else ""
        lines.append(
            f"{name}: avg@{entry['samples']} {entry['avg_at_k']:.3f}{before}, 95 % interval [{entry['low']:.3f}, "
            f"{entry['high']:.3f}] on {entry['problems']} problems; pass@{entry['samples']} {entry['pass_at_k']:.3f}."
        )
    return lines


def _training(run: Run) -> str:
    accuracy, length = (_ends(series(run.rows, name)[1]) for name in (names.ACCURACY, names.LENGTH))
    if accuracy is None or length is None:
        return ""
    return (
        f"From the first tenth of the steps to the last, training accuracy went from {accuracy[0]:.3f} to "
        f"{accuracy[1]:.3f} and responses from {length[0]:,.0f} to {length[1]:,.0f} tokens."
    )


def _critic(run: Run) -> str:
    critic, group, position, gain = (
        _ends(series(run.rows, name)[1])
        for name in (names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION, names.CRITIC_GAIN)
    )
    if critic is None:
        return ""
    text = f"In the last tenth the critic explained {critic[1]:.0%} of the variance of returns"
    if group is None or position is None:
        return text + "."
    text += f"; for free, the mean of the other responses explains {group[1]:.0%}, the position {position[1]:.0%}"
    return text + (f"; beyond both the critic adds {gain[1]:.0%}." if gain is not None else ".")


def _time(run: Run) -> str:
    shares = phases(run.rows)
    total = sum(row.get(names.STEP_TIME) or 0.0 for row in run.rows)
    if sum(row["seconds"] for row in shares) < 0.5 * total or not total:
        return ""  # a fine-tuning times little of what it does
    longest = ", ".join(f"{row['name']} ({row['share']:.0%})" for row in shares[:3])
    return f"Most of the time went into {longest}."


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
