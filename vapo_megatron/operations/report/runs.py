"""Reads a run directory for a report."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.metrics import PROBLEMS
from vapo_megatron.evaluation.sets import intervals_of
from vapo_megatron.files import parse_json
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import METRICS_FILE, read_metrics
from vapo_megatron.monitoring.pictures import Picture, histogram
from vapo_megatron.operations.critic_lab.points import POINTS, picture_of_values
from vapo_megatron.operations.plan.pictures import pictures_of
from vapo_megatron.operations.report.panels import Rows

# How many responses of a run a page shows.
STEPS_OF_SAMPLES = 12
BYTES_OF_SAMPLES = 3 << 20
_SAMPLES_OF_STEP = re.compile(r"step_(\d+)\.jsonl")
_START = re.compile(r"tfevents\.(\d+)\.")
# Fields of the result of a set.
_FIGURES = (
    "problems",
    "samples",
    "avg_at_k",
    "low",
    "high",
    "pass_at_k",
    "maj_at_k",
    "response_length",
    "truncated",
)


@dataclass(frozen=True)
class Run:
    """One run directory, of a training, a fine-tuning or an evaluation.

    evaluation, environment, plan and probes hold evaluation.json, environment.json, plan.json
    (`vapo-megatron plan --json`) and critic_probes/probes.json; empty if missing.
    """

    directory: Path
    rows: Rows = ()
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.resolve().name

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Its config; empty if it cannot be read."""
        try:
            settings = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        if isinstance(settings, dict):
            return settings
        return {}

    def facts(self) -> dict[str, str]:
        """Date, preset, model, data, machine and commit, those that its files have."""
        settings = self.settings
        machine = self.environment
        sections = {
            name: section for name, section in settings.items() if isinstance(section, Mapping)
        }
        data = sections.get("data", {}).get("train")
        facts = {
            "date": self._date(),
            "preset": settings.get("preset"),
            "model": sections.get("model", {}).get("path"),
            "data": ", ".join(map(str, data)) if isinstance(data, list | dict) else data,
            "machine": machine.get("hostname")
            and f"{machine['hostname']} ({machine.get('cpu_cores')} cores)",
            "commit": str(machine.get("commit") or "")[:10],
        }
        return {name: str(fact) for name, fact in facts.items() if fact}

    def _date(self) -> str:
        """When its last row or evaluation was written, by its own clock. A copy has other times of
        files; a run of an earlier version has only the start that names TensorBoard's files."""
        recorded = [record.get(names.WRITTEN_AT) for record in (*self.rows, self.evaluation)]
        times = [seconds for seconds in recorded if isinstance(seconds, int | float)]
        if times:
            return _minute(max(times))
        events = (self.directory / "tensorboard").rglob("events.out.tfevents.*")
        starts = [int(match[1]) for path in events if (match := _START.search(path.name))]
        return f"{_minute(max(starts))} (last start)" if starts else "not recorded"

    def samples(self) -> list[dict[str, Any]]:
        """Responses to browse, each with its `step` or `set`: of some steps, always including the
        first and the last.

        No more than STEPS_OF_SAMPLES steps and BYTES_OF_SAMPLES in all.
        """
        paths = (self.directory / "samples").glob("step_*.jsonl")
        files = {
            int(match[1]): path
            for path in paths
            if (match := _SAMPLES_OF_STEP.fullmatch(path.name))
        }
        steps = sorted(files)
        most = STEPS_OF_SAMPLES - 1
        if len(steps) > STEPS_OF_SAMPLES:
            steps = [steps[round(i * (len(steps) - 1) / most)] for i in range(STEPS_OF_SAMPLES)]
        origins: list[tuple[dict[str, Any], Path]] = [
            ({"step": step}, files[step]) for step in steps
        ]
        # An evaluation within a training names its responses by the step.
        if (step := self.evaluation.get("step")) is None:
            prefix = ""
        else:
            prefix = f"step_{step:06d}_"
        origins += [
            ({"set": name}, self.directory / "evaluation" / f"{prefix}{name}.jsonl")
            for name in self.sets
        ]
        origins = [(origin, path) for origin, path in origins if path.is_file()]
        share = BYTES_OF_SAMPLES // max(1, len(origins))
        return [origin | row for origin, path in origins for row in _within(path, share)]

    def problems(self) -> list[dict[str, Any]]:
        """The problems of an evaluation, each with its `set`; none if there is no such file."""
        files = {name: self.directory / "evaluation" / f"{name}{PROBLEMS}" for name in self.sets}
        return [
            {"set": name} | row
            for name, path in files.items()
            if path.is_file()
            for _, row in read_rows(path)
        ]

    def pictures(self) -> list[Picture]:
        """Of its evaluation, of its critic's probes, and of its plan.

        Raises:
            BadInput: a file was not written by these commands.
        """
        found: list[Picture] = []
        if self.sets:
            found.append(intervals_of(list(self.sets.values())))
        for name in self.sets:
            problems = [row for row in self.problems() if row["set"] == name]
            shares = [row["correct"] / row["samples"] for row in problems]
            if shares:
                title = f"{name}: problems by the share of correct responses"
                # A bin around each share that there can be, or around every tenth
                half = 0.5 / min(10, max(row["samples"] for row in problems))
                bins = round(0.5 / half) + 1
                found.append(histogram(title, "problems", shares, -half, 1 + half, bins, -1.0))
        try:
            if self.probes:
                found.append(picture_of_values([(x, y) for x, y in self.probes["points"]]))
            if self.plan:
                found += pictures_of(self.plan)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise BadInput(
                f"{self.directory}: plan.json or critic_probes/{POINTS} is not of this version: "
                "write it again, or remove it"
            ) from None
        return found

    @property
    def sets(self) -> dict[str, Mapping[str, Any]]:
        """The results of its last evaluation, by name."""
        return {entry["name"]: entry for entry in self.evaluation.get("sets", ())}


def _minute(unix_seconds: float) -> str:
    """Of the local clock."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))
    except (OverflowError, ValueError, OSError):
        return f"not a time ({unix_seconds:g})"


def _within(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """Rows of a file that take `size` bytes together: the first response to each problem, then the
    second, and on."""
    seen = Counter[str]()
    rows = []
    taken = 0
    for _, row in islice(read_rows(path), 4096):
        problem = str(row.get("group", row.get("id")))
        rows.append((seen[problem], row))
        seen[problem] += 1
    for _, row in sorted(rows, key=itemgetter(0)):
        taken += len(json.dumps(row))
        if taken > size:
            return
        yield row


def read_run(directory: Path) -> Run:
    """Raises BadInput if it is no run directory, has nothing to report on, or holds a file that
    cannot be read."""
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such run directory; give one, such as runs/vapo")
    rows = read_metrics(directory)
    evaluation = read_evaluation(directory)
    if not rows and not evaluation:
        raise BadInput(
            f"{directory / METRICS_FILE}: no step in it, and no evaluation.json next to it; report "
            f"on a run that has "
            "finished a step"
        )
    config = directory / "config.yaml"
    environment = _read_json(directory / "environment.json")
    if config.is_file():
        text = config.read_text(encoding="utf-8", errors="replace")
    else:
        text = ""
    plan = _read_json(directory / "plan.json")
    probes = _read_json(directory / "critic_probes" / POINTS)
    return Run(directory, rows, evaluation, environment, text, plan, probes)


def read_evaluation(directory: Path) -> dict[str, Any]:
    """evaluation.json of a run; empty if there is none. Raises BadInput if it holds something
    else."""
    path = directory / "evaluation.json"
    evaluation = _read_json(path)
    sets = evaluation.get("sets", [])
    step = evaluation.get("step", 0)
    if evaluation and not (
        isinstance(sets, list) and all(map(_is_result, sets)) and isinstance(step, int)
    ):
        raise BadInput(
            f"{path}: not written by an evaluation of this version; evaluate again, or remove it"
        )
    return evaluation


def _is_result(one: Any) -> bool:
    """Whether it has the fields of a SetResult that a report shows."""
    return (
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and all(isinstance(one.get(figure), int | float) for figure in _FIGURES)
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({error}); fix or remove it") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object; fix or remove it")
    return content
