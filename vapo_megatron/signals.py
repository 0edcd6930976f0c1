"""Requests to save and stop: SIGUSR1 (Slurm's warning before a limit), SIGTERM (cancelled,
preempted, drained) and SIGHUP (the terminal is gone; ignored under nohup).

A handler only records the request; the run acts on it when its state is consistent. A repeated
signal is the same request. This module also ends processes that run untrusted code, with everything
that the code has started.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TREE_SECONDS = 5.0  # for the kernel to end killed processes

_received: list[str] = []
_terminals: list[int] = []


def listen() -> None:
    """Take note of stop signals from now on instead of dying of them. Main thread only."""
    _terminals[:] = [file for file in (1, 2) if os.isatty(file)]
    for number in heeded_signals():
        signal.signal(number, take_note)


def take_note(number: int, _: Any) -> None:
    """Handler of a stop signal: from now on stop_requested() names it."""
    leave_terminal(number)
    _received.append(signal.Signals(number).name)


def heeded_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where this process was started to ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def ignore_stop_signals() -> None:
    """Ignore stop signals once everything is saved, so that a late one does not look like a
    failure."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_terminal(number: int) -> None:
    """After SIGHUP: send output to /dev/null, as writing to a terminal that is gone is an error."""
    if number == signal.SIGHUP:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for file in _terminals:
            os.dup2(nowhere, file)
        os.close(nowhere)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Processes that this thread starts in here do not get stop signals, from their first
    instruction on.

    Signals sent to this thread meanwhile arrive afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process killed, or sent another signal, when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, daemons included; exec
    keeps this."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_tree(pid: int) -> None:
    """Kill a child of this process that adopts orphans, and all its descendants, in whichever
    session they are.

    The caller waits for the child. If the child has already ended by itself, only its process group
    is killed.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it starts nothing more, and still adopts
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        end = time.monotonic() + _TREE_SECONDS
        gone = set[psutil.Process]()
        while time.monotonic() < end:
            # Until it has stopped it may start another one; so may one that ends by itself after it
            # was listed.
            starts_none = root.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
            left = set(root.children(recursive=True)) - gone
            if starts_none and not left:
                break
            gone |= {child for child in left if not _killed(child)}
            time.sleep(0.001)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(spared: Callable[[psutil.Process], bool] = lambda _: False) -> int:
    """Kill and reap all descendants of this process, which adopts orphans; returns how many were
    alive.

    Args:
        spared: whether one stays, with its children.
    """
    this = psutil.Process()
    end = time.monotonic() + _TREE_SECONDS
    killed = set[psutil.Process]()
    gone = set[psutil.Process]()
    while time.monotonic() < end:
        children = [child for child in this.children() if not spared(child)]
        left = set(children) - gone
        for child in children:
            with suppress(psutil.Error):
                left |= set(child.children(recursive=True)) - gone
        if not left:
            break
        alive = {process for process in left if _killed(process)}
        killed |= alive
        gone |= left - alive
        for child in children:
            with suppress(OSError):  # its owner may have waited for it
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(0.001)
    return len(killed)


def _killed(process: psutil.Process) -> bool:
    """Send SIGKILL; False where the process had ended already."""
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            process.kill()
            return True
    return False


def how_it_ended(code: int) -> str:
    """A process's exit code, as subprocess gives it, in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def stop_requested() -> str | None:
    """The name of the first stop signal that this process received; None if there was none."""
    return _received[0] if _received else None


def first_signal(of_ranks: Sequence[str | None]) -> str | None:
    """The first stop signal of all ranks, with its rank unless all got one; None if
    none did."""
    for rank, name in enumerate(of_ranks):
        if name is not None:
            return name if all(of_ranks) else f"{name} on rank {rank}"
    return None


def job_end_time(environment: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm will end this job (Unix time); None outside Slurm and in jobs without a limit."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() and int(end) > 0 else None
