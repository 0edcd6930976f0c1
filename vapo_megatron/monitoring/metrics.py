"""The metrics of a run, one row per step: metrics.jsonl."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.errors import BadInput

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends a JSON object a step to run_dir/metrics.jsonl.

    Rows of steps from start_step on, left by an earlier attempt of the run, are removed first: 0 starts afresh.
    `kept` are those before it. NaN and infinite metrics are written as null.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        """Raises BadInput where run_dir cannot be written."""
        self.path = run_dir / METRICS_FILE
        self.kept = [row for row in read_metrics(run_dir) if row["step"] < start_step]
        with atomic_write(self.path) as file:
            file.writelines(json.dumps(row) + "\n" for row in self.kept)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Append the row of `step`, which is in the file when this returns; its finite metrics.

        Raises BadInput where the row cannot be written; no part of it is left in the file then.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, Any] = {"step": step} | {name: finite.get(name) for name in metrics}
        self._append((json.dumps(row) + "\n").encode())
        return finite

    def close(self) -> None:
        """End the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            os.ftruncate(self._file, size)
            raise BadInput(f"{self.path}: cannot be written ({error.strerror}): make room on its disk") from error


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of run_dir/metrics.jsonl in their order; none where there is no such file.

    A last line cut off by a kill is passed over. Raises BadInput for any other line that is not a step's row.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: not JSON ({error}); mend or remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise BadInput(f'{path}:{number}: expected a JSON object with a whole number "step"; mend or remove it')
        rows.append(row)
    return rows
