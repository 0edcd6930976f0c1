"""The package's log: one format with time, rank and phase, on standard error; `--log-level` sets
how much it says.

Tables, step lines and results are not in it: they go to standard output (monitoring/console.py).
The one line of a failed command goes to standard error without this format (errors.py).
"""

import logging
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

_FORMAT = "%(asctime)s %(levelname)s rank %(rank)s %(phase)s: %(message)s"
_LOGGER = logging.getLogger("vapo_megatron")
NO_PHASE = "-"
ATTENDING = "wait_for_rank_0"  # while it has engines generate
_place = {"rank": "-", "phase": NO_PHASE}


@dataclass(frozen=True)
class PhaseNow:
    """A process's current phase, the number of phases begun, and when this one began
    (time.monotonic())."""

    phase: str
    begun: int
    since: float


_phase = PhaseNow(NO_PHASE, 0, time.monotonic())
_progressed = _phase.since


class LogLevel(StrEnum):
    """The lowest level that is written; debug adds the beginning and the seconds of every phase on
    every rank."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _StandardError(logging.Handler):
    """Writes to the current sys.stderr, one flushed line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _Outlived:
    """A standard stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """From now on what this process prints may be lost (a full disk, a reader that is gone), and
    neither ends a run nor changes its exit code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Outlived):
            setattr(sys, name, _Outlived(stream))


def configure(level: LogLevel) -> None:
    """Write records of this level and above to standard error. May be called again, also in a child
    process."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(_add_place)
    _LOGGER.handlers = [handler]
    _LOGGER.setLevel(level.upper())
    # Libraries add handlers to the root logger, which would write each line twice.
    _LOGGER.propagate = False


def configured_level() -> LogLevel:
    """The level of the last configure(); info before the first."""
    return LogLevel(logging.getLevelName(_LOGGER.level).lower()) if _LOGGER.level else LogLevel.INFO


def set_rank(rank: int) -> None:
    """Set this process's rank."""
    _place["rank"] = str(rank)


def set_phase(phase: str | None) -> None:
    """Set this process's phase; None between phases."""
    global _phase
    _place["phase"] = phase or NO_PHASE
    _phase = PhaseNow(phase or NO_PHASE, _phase.begun + 1, time.monotonic())
    note_progress()


def note_progress() -> None:
    """Note that a part of this phase is done."""
    global _progressed
    _progressed = time.monotonic()


def last_progress() -> float:
    """When a part of this phase was last done, or the phase began (time.monotonic())."""
    return _progressed


def phase_now() -> PhaseNow:
    """This process's current phase."""
    return _phase


def _add_place(record: logging.LogRecord) -> bool:
    record.__dict__.update(_place)
    return True
