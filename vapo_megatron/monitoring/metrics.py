"""The metrics of a run, one row per step: metrics.jsonl."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput, RunFailed

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
        self._counts_links = os.fstat(self._file).st_nlink > 0  # some network file systems never do

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Append the row of `step`, which is in the file when this returns; its finite metrics.

        Raises BadInput where the row cannot be written; no part of it is left in the file then. RunFailed where the
        file is gone, as with its run directory.
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

    def _append(self, line: bytes) -> None:
        status = os.fstat(self._file)
        if self._counts_links and status.st_nlink == 0:
            raise RunFailed(f"{self.path}: was removed while the run goes on, which is lost: start anew")
        size = status.st_size
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
    rows: list[dict[str, Any]] = []
    for number, row in read_rows(path, may_be_cut=True) if path.exists() else ():
        odd = [name for name, value in row.items() if value is not None and not _is_number(value)]
        if odd or not isinstance(row.get("step"), int):
            name = (odd or ["step"])[0]
            raise BadInput(
                f'{path}:{number}: {name} is {str(row.get(name))[:40]}; expected a whole number "step" and finite '
                "numbers or null beside it: mend or remove the line"
            )
        rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
