"""A server must not outlive its owner, however that ended: kill -9 and the out-of-memory killer
included.

    python -m vapo_megatron.engines.inside.owner_guard OWNER_PID GROUP SCRATCH

The guard is a separate process, because a stopped server (SIGSTOP) could not end itself. The server
waits for it before it does anything, and reports on it as on its own processes (heartbeat).
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vapo_megatron.engines.inside.heartbeat import processes_in, register
from vapo_megatron.signals import end_with_parent, stop_signals_blocked

_ROLE = "guard"
_POLL_SECONDS = 1.0
_START_POLL_SECONDS = 0.02
_REMOVAL_SECONDS = 5.0


def start_guard(
    group: int, scratch: str, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the guard of one of this process's servers. Once this process is gone, it kills the
    server's process group and removes the directory scratch and the server's shared memory.

    This process holds the write end of a pipe, so its death is an end of file at the other end. A
    process that it forked may hold the pipe open, so the guard also checks its parent once a
    second.
    """
    with stop_signals_blocked():  # Slurm sends them to every process of a job
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vapo_megatron.engines.inside.owner_guard",
                *map(str, (os.getpid(), group, scratch)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def is_guarded(owner: int, scratch: str) -> bool:
    """In a server: wait for its guard. If the owner died before starting it, remove scratch and
    return False."""
    while not any(role == _ROLE for role, _, _ in processes_in(scratch)):
        if os.getppid() != owner:
            shutil.rmtree(scratch, ignore_errors=True)
            return False
        time.sleep(_START_POLL_SECONDS)
    return True


def remove_shared_memory(group: int) -> None:
    """Remove a server's files in /dev/shm, which its processes cannot remove when they are
    killed."""
    for path in Path("/dev/shm").glob(f"sgl_shm_*_{group}_*"):
        path.unlink(missing_ok=True)


def main(owner: int, group: int, scratch: str) -> None:
    """Wait for the end of the owner, then end its server."""
    tempfile.tempdir = scratch
    end_with_parent(signal.SIGCONT)  # wakes this process where it was stopped; it looks by itself
    register(_ROLE)
    lifeline = sys.stdin.fileno()
    while os.getppid() == owner:
        readable, _, _ = select.select([lifeline], [], [], _POLL_SECONDS)
        if readable and not os.read(lifeline, 4096):
            break
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + _REMOVAL_SECONDS
    # The last of its processes still write
    while os.path.exists(scratch) and time.monotonic() < end:
        shutil.rmtree(scratch, ignore_errors=True)
    remove_shared_memory(group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
