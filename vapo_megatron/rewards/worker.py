"""A verifier process: `python -m vapo_megatron.rewards.worker TRAINER_PID`, started and fed by
rewards.workers alone.

It forks: the child is the worker, the parent supervises it. The worker reads messages on stdin and
answers each on stdout: JSON, one message per line. The first says what to load. A worker may be
killed at any moment and holds nothing that matters. However it ends, and however the trainer ends,
the supervisor then ends everything that the worker has started, daemons included.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from vapo_megatron.errors import reason_of
from vapo_megatron.signals import adopt_orphans, end_descendants, end_with_parent

_MIB = 1 << 20
_MOST_CHILDREN = 256
# Asks a supervisor to end.
END_SIGNAL = signal.SIGRTMIN + 1

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    """Serve until stdin closes."""
    trainer = int(sys.argv[1])
    # The kernel sends it when the trainer dies: it wakes a supervisor that was stopped, too.
    end_with_parent(signal.SIGCONT)
    if os.getppid() != trainer:
        return  # it died before the kernel was asked
    for ignored in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGHUP,
    ):
        # Sent to whole process groups; the trainer decides when we end
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        _supervise(worker, trainer)
    end_with_parent()
    if os.getppid() == supervisor:
        _serve()


def _supervise(worker: int, trainer: int) -> NoReturn:
    """Wait for the worker's end, end its leftover processes, and end as it did."""

    def end_if_alone(*_: object) -> None:
        if os.getppid() != trainer:
            _end_everything()

    signal.signal(END_SIGNAL, _end_everything)
    signal.signal(signal.SIGCONT, end_if_alone)
    end_if_alone()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # the trainer sees the end of the worker by the end of its messages
    os.dup2(nowhere, 1)
    child = 0
    while child != worker:  # others are orphans, which are reaped
        child, status = os.waitpid(-1, 0)
    end_descendants()
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(1)


def _end_everything(*_: object) -> None:
    end_descendants()
    os._exit(1)


def _serve() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(nowhere, 0)  # a verifier can read nothing there
        os.dup2(nowhere, 1)  # and its output is discarded
        handler: Handler | None = None
        for line in requests:
            message = json.loads(line)
            reply = {}
            if handler is not None:
                reply = _handle(handler, message)
                _reap()
            else:
                # What it allocates, not its address space: the CUDA build of torch maps more than
                # that in files alone. workers.py watches memory that this does not count.
                memory = message["memory_mib"] * _MIB
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
                try:
                    handler = _load(message)
                except BaseException as error:  # a user's module may raise anything, SystemExit too
                    reply = {"failed": reason_of(error)}
            with suppress(BrokenPipeError):
                replies.write(json.dumps(reply).encode() + b"\n")
                replies.flush()


def _reap() -> None:
    """Reap finished children once there are many: a function may still ask for their exit
    codes."""
    with suppress(OSError):
        if (
            len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
            > _MOST_CHILDREN
        ):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _load(message: dict[str, Any]) -> Handler:
    from vapo_megatron.rewards.verifier import verifier_of

    verifier = verifier_of(SimpleNamespace(**message))  # type: ignore[arg-type]
    verifier.load()
    return verifier.grade


def _handle(handler: Handler, case: dict[str, Any]) -> dict[str, Any]:
    try:
        return handler(case)
    except MemoryError as error:
        return {"correct": False, "reason": "memory", "detail": reason_of(error)}
    except BaseException as error:  # a user's function may raise anything, SystemExit too
        return {"correct": False, "reason": "error", "detail": reason_of(error)}


if __name__ == "__main__":
    main()
