"""Requests to save and stop: SIGUSR1 (Slurm's warning before a limit) and SIGTERM (cancelled, preempted, drained).

A handler only takes note; the run looks at it where its state is whole. A repeated signal is the same request.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

_received: list[str] = []


def listen() -> None:
    """Take note of the stop signals from now on instead of dying of them. Main thread alone."""
    for number in STOP_SIGNALS:
        signal.signal(number, _take_note)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Processes that this thread starts in here do not get the stop signals, from their first instruction on.

    What is sent to this thread meanwhile comes afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_requested() -> str | None:
    """The name of the first stop signal that this process was sent; None if there was none."""
    return _received[0] if _received else None


def job_end_time(environment: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm will end this job (Unix time); None outside Slurm and in jobs without a limit."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() and int(end) > 0 else None


def _take_note(number: int, _: Any) -> None:
    _received.append(signal.Signals(number).name)
