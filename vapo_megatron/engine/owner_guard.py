"""A server must not outlive its trainer, however that one ended: kill -9 and the out-of-memory killer included."""

import os
import select
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 1.0
_REMOVAL_SECONDS = 5.0


def kill_group_with_owner(lifeline: int, owner_pid: int, scratch: str) -> threading.Thread:
    """Start a thread that kills this process's whole group (SIGKILL) as soon as the owner is gone.

    It removes the directory scratch first, which nobody else is left to do.

    lifeline is the read end of a pipe whose write end the owner holds: its end of file tells of the owner's death at
    once. A process that the owner forked may have inherited the write end and keep it open, so this process's parent
    is asked for as well, once a second. The caller leads a process group of its own, which its children share.
    """
    thread = threading.Thread(target=_watch, args=(lifeline, owner_pid, scratch), name="owner-guard", daemon=True)
    thread.start()
    return thread


def remove_shared_memory(group: int) -> None:
    """Remove what the processes of a server share in /dev/shm under names that they cannot remove when killed."""
    for path in Path("/dev/shm").glob(f"sgl_shm_*_{group}_*"):
        path.unlink(missing_ok=True)


def _kill_others() -> None:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(path.name)
            if pid != os.getpid() and os.getpgid(pid) == os.getpgrp():
                os.kill(pid, signal.SIGKILL)


def _watch(lifeline: int, owner_pid: int, scratch: str) -> None:
    while os.getppid() == owner_pid:
        readable, _, _ = select.select([lifeline], [], [], _POLL_SECONDS)
        if readable and not os.read(lifeline, 4096):
            break
    _kill_others()  # first: they would go on writing into what is removed
    end = time.monotonic() + _REMOVAL_SECONDS
    while os.path.exists(scratch) and time.monotonic() < end:  # the last of them, and this one's threads, still write
        shutil.rmtree(scratch, ignore_errors=True)
    remove_shared_memory(os.getpgrp())
    os.killpg(os.getpgrp(), signal.SIGKILL)
