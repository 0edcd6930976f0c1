"""metrics.jsonl: the metrics of a run, one row per step."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.files import atomic_write, cannot_write
from vapo_megatron.monitoring import names

_logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_MOST_PENDING = 10  # rows that may wait for the disk


class MetricsWriter:
    """Appends one JSON object per step to run_dir/metrics.jsonl.

    Rows that an earlier attempt of the run left for start_step and later steps are removed first; 0
    starts afresh. `kept` are the rows before it. NaN and infinite metrics are written as null.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        """Raises BadInput where run_dir cannot be written."""
        self.path = run_dir / METRICS_FILE
        self.kept = [row for row in read_metrics(run_dir) if row["step"] < start_step]
        with atomic_write(self.path) as file:
            file.writelines(json.dumps(row) + "\n" for row in self.kept)
        self._pending, self._size = b"", self.path.stat().st_size
        self.refused = 0  # writes

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Append the row of `step` and return its finite metrics. What the disk refuses is written
        with the next row.

        Raises TryAgain where it refuses many in a row; RunFailed where the file is gone, as with
        its run directory.
        """
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, Any] = {"step": step} | {name: finite.get(name) for name in metrics}
        self._pending += (json.dumps(row) + "\n").encode()
        self._flush(_MOST_PENDING)
        return finite

    def close(self) -> None:
        """Write the pending rows. Raises TryAgain if the disk still refuses them."""
        if self._pending:
            self._flush(most_pending=0)

    def _flush(self, most_pending: int) -> None:
        try:
            with self.path.open("r+b") as file:  # opened each time: a handle may go stale
                file.seek(self._size)  # overwrites the rest of a refused write
                file.write(self._pending)
        except FileNotFoundError:
            self._pending = b""
            raise RunFailed(
                f"{self.path}: was deleted during the run: start again with run.resume=auto, which "
                "restores its rows from the last checkpoint"
            ) from None
        except OSError as error:
            self.refused += 1
            _logger.warning(
                "%s: %s; the row is written with the next one", self.path, error.strerror
            )
            if self._pending.count(b"\n") > most_pending:
                raise TryAgain(
                    f"{cannot_write(self.path, error)}, then start again with run.resume=auto"
                ) from error
        else:
            self._size = self._size + len(self._pending)
            self._pending = b""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of run_dir/metrics.jsonl in order; none where there is no such file.

    A last line cut off by a kill is skipped. Raises BadInput for any other line that is not the row
    of a step.
    """
    path = run_dir / METRICS_FILE
    rows: list[dict[str, Any]] = []
    for number, row in read_rows(path, may_be_cut=True) if path.exists() else ():
        numbers = {name: value for name, value in row.items() if value is not None}
        odd = [
            n
            for n, value in numbers.items()
            if not isinstance(value, int | float) or not math.isfinite(value)
        ]
        if odd or not isinstance(row.get("step"), int):
            name = (odd or ["step"])[0]
            raise BadInput(
                f"{path}:{number}: {name} is {str(row.get(name))[:40]}; expected a whole number "
                '"step" and finite numbers or null otherwise: fix or remove the line'
            )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Totals:
    """What the rows of a run add up to: hours, GPU-hours (0: it had no GPU) and response tokens."""

    hours: float
    gpu_hours: float
    tokens: float


def totals(rows: Sequence[Mapping[str, Any]]) -> Totals:
    """The cost of a run. What an attempt did after its last row that was kept is not in it."""
    sums = [
        sum(row.get(name) or 0.0 for row in rows)
        for name in (names.HOURS, names.GPU_HOURS, names.RESPONSE_TOKENS)
    ]
    return Totals(*sums)
