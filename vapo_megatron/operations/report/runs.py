"""What a run directory holds, read for a report."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.errors import BadInput
from vapo_megatron.experience.jsonl import read_rows
from vapo_megatron.monitoring.metrics import METRICS_FILE, read_metrics
from vapo_megatron.operations.report.panels import Rows

# What a page takes of the responses of a run.
STEPS_OF_SAMPLES = 12
BYTES_OF_SAMPLES = 3 << 20


@dataclass(frozen=True)
class Run:
    """One run directory, of a training, a fine-tuning or an evaluation.

    evaluation is the content of evaluation.json, environment that of environment.json; empty where there is none.
    """

    directory: Path
    rows: Rows = ()
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.resolve().name

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Its config, as far as it can be read."""
        try:
            found = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return found if isinstance(found, dict) else {}

    def samples(self) -> list[dict[str, Any]]:
        """Responses to browse, each with the `step` or `set` it is of: of some steps, from the first to the last.

        No more than STEPS_OF_SAMPLES steps and BYTES_OF_SAMPLES in all.
        """
        files = sorted((self.directory / "samples").glob("step_*.jsonl"))
        many = len(files) - 1
        chosen = {round(i * many / (STEPS_OF_SAMPLES - 1)) for i in range(STEPS_OF_SAMPLES)} if many > 0 else {0}
        files = [file for number, file in enumerate(files) if number in chosen]
        origins: list[tuple[dict[str, Any], Path]] = [
            ({"step": int(file.stem.removeprefix("step_"))}, file) for file in files
        ]
        folder = self.directory / "evaluation"
        in_training = re.compile(r"step_\d+_")
        sets = [one["name"] for one in self.evaluation.get("sets", ())]
        origins += [({"set": name}, folder / f"{name}.jsonl") for name in sets]
        last = sorted(path for path in folder.glob("step_*.jsonl") if in_training.match(path.name))[-len(sets) :]
        origins += [({"set": in_training.sub("", path.stem)}, path) for path in last]
        origins = [(origin, path) for origin, path in origins if path.is_file()]
        share = BYTES_OF_SAMPLES // max(1, len(origins))
        return [origin | row for origin, path in origins for row in _within(path, share)]

    def problems(self) -> list[dict[str, Any]]:
        """The problems of an evaluation, each with its `set`; none where it has kept no such file."""
        found = []
        for one in self.evaluation.get("sets", ()):
            path = self.directory / "evaluation" / f"{one['name']}_problems.jsonl"
            if path.is_file():
                found += [{"set": one["name"]} | row for _, row in read_rows(path)]
        return found


def _within(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The first rows of a file that take `size` bytes together."""
    taken = 0
    for _, row in islice(read_rows(path), 4096):
        taken += len(json.dumps(row))
        if taken > size:
            return
        yield row


def read_run(directory: Path) -> Run:
    """Raises BadInput where it is no run directory, has nothing to report on, or holds a file that cannot be read."""
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such run directory; give one, such as runs/vapo")
    rows, evaluation = read_metrics(directory), _read_json(directory / "evaluation.json")
    if not rows and not evaluation:
        raise BadInput(
            f"{directory / METRICS_FILE}: no step in it, and no evaluation.json beside it; report on a run that has "
            "finished a step"
        )
    config = directory / "config.yaml"
    return Run(
        directory=directory,
        rows=rows,
        evaluation=evaluation,
        environment=_read_json(directory / "environment.json"),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error}); mend or remove it") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a JSON object; mend or remove it")
    return found
