"""Requests to save and stop: SIGUSR1 (Slurm's warning before a limit), SIGTERM (cancelled, preempted, drained) and
SIGHUP (a terminal that is gone, unless nohup has it ignored).

A handler only takes note; the run looks at it where its state is whole. A repeated signal is the same request.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

_received: list[str] = []
_terminals: list[int] = []


def listen() -> None:
    """Take note of the stop signals from now on instead of dying of them. Main thread alone."""
    _terminals[:] = [file for file in (1, 2) if os.isatty(file)]
    for number in heeded_signals():
        signal.signal(number, _take_note)


def heeded_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where this process was started to ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def ignore_stop_signals() -> None:
    """All is saved: a request to do so, which may come until this process is gone, must not look like a failure."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_terminal(number: int) -> None:
    """After SIGHUP: whatever is written to a terminal that is gone is an error, and is written nowhere instead."""
    if number == signal.SIGHUP:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in _terminals:
            os.dup2(nowhere, file)
        os.close(nowhere)


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
    leave_terminal(number)
    _received.append(signal.Signals(number).name)
