"""A server's report on whether all of its processes are alive and make progress.

Each process of a server has a file in the server's folder of temporary files, into which a
scheduler writes the time and the number of its batches. The HTTP process reads them for
HEALTH_PATH, and ends the server on END_PATH.
"""

import functools
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

HEALTH_PATH = "vapo_health"
END_PATH = "vapo_end"

_PREFIX = "process-"
_BEAT = struct.Struct("dq")  # time, batches that have ended
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}


def register(role: str) -> Callable[[int], None]:
    """Register this process as one of the server's. Returns a function to call at every sign of
    progress, with the number of finished batches."""
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}{role}-{os.getpid()}"
    path.write_bytes(_BEAT.pack(time.monotonic(), 0))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _BEAT.size)

    def beat(batches: int) -> None:
        _BEAT.pack_into(memory, 0, time.monotonic(), batches)

    return beat


def processes_in(scratch: str) -> Iterator[tuple[str, int, Path]]:
    """Role, pid and file of each process of the server with this folder of temporary files, dead
    ones included."""
    for path in Path(scratch).glob(f"{_PREFIX}*"):
        _, role, pid = path.name.split("-")
        yield role, int(pid), path


def lost_processes(scratch: str) -> list[str]:
    """A line for each dead or stopped process of the server with this folder of temporary files."""
    states = [(role, pid, stands_still(pid)) for role, pid, _ in processes_in(scratch)]
    return sorted(
        f"its {role} (process {pid}) is {state}" for role, pid, state in states if state is not None
    )


def stands_still(pid: int) -> str | None:
    """Whether a process is dead or stopped, in words; None if it is neither."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    return _STATES.get(state)


def beats_with(scheduler: Any, beat: Callable[[int], None]) -> None:
    """Have SGLang's scheduler class call beat before and after each batch."""
    run_batch = scheduler.run_batch
    ended = 0

    @functools.wraps(run_batch)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal ended
        beat(ended)
        try:
            return run_batch(*args, **kwargs)
        finally:
            ended += 1
            beat(ended)

    scheduler.run_batch = watched


class Heartbeat:
    """The HTTP process' view of the other processes.

    Args:
        requests: returns the unanswered requests.
        is_paused: returns whether the server is paused for a weight sync.
    """

    def __init__(
        self, requests: Callable[[], Sized], is_paused: Callable[[], bool] = lambda: False
    ) -> None:
        self._requests = requests
        self._is_paused = is_paused
        self._was_paused = False
        self._idle_at = time.monotonic()

    async def health(self) -> dict[str, Any]:
        """lost: a line for each dead or stopped process. requests: number of open ones. silent_s:
        seconds in which no batch has begun or ended although there were requests, since the last
        pause. paused: whether it is paused.
        batches: number of finished ones."""
        now = time.monotonic()
        beats = [self._idle_at]
        batches = 0
        for _, _, path in processes_in(tempfile.gettempdir()):
            beat, ended = _BEAT.unpack(path.read_bytes())
            beats.append(beat)
            batches = max(batches, ended)
        requests = len(self._requests())
        paused = self._is_paused()
        if requests == 0 or (self._was_paused and not paused):
            self._idle_at = now
            beats.append(now)
        self._was_paused = paused
        silent = now - max(beats)
        lost = lost_processes(tempfile.gettempdir())
        return {
            "lost": lost,
            "requests": requests,
            "silent_s": silent,
            "paused": paused,
            "batches": batches,
        }

    async def end(self, cause: str) -> None:
        """End all processes of the server, after writing the cause to the log; its owner starts it
        again."""
        print(f"EndedForError: {cause}", flush=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)
