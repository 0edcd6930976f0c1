"""A verifier process: `python -m vapo_megatron.rewards.worker TRAINER_PID`, started and fed by rewards.workers alone.

It reads messages on stdin and answers each on stdout: JSON, one message per line. The first says what to load. A worker
may be killed at any moment and holds nothing that matters. The kernel kills it with the trainer, however the trainer
dies, even if the worker is stopped.
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vapo_megatron.errors import reason_of
from vapo_megatron.signals import adopt_orphans, end_with_parent

_MIB = 1 << 20
_MOST_CHILDREN = 256

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    """Serve until stdin closes."""
    # Ends with the thread that started us: one of the pool's, or the one that made the pool.
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        return  # it died before the kernel was asked
    nowhere = os.open(os.devnull, os.O_RDWR)
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(nowhere, 0)  # a verifier can read nothing there
        os.dup2(nowhere, 1)  # and what it prints goes nowhere
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)  # sent to whole process groups; the trainer decides when we end
        adopt_orphans()
        handler: Handler | None = None
        for line in requests:
            message, reply = json.loads(line), {}
            if handler is not None:
                reply = _handle(handler, message)
                _reap()
            else:
                memory = message["memory_mib"] * _MIB
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                try:
                    handler = _load(message)
                except Exception as error:  # whatever a user's module raises on import goes to the trainer
                    reply = {"failed": reason_of(error)}
            with suppress(BrokenPipeError):
                replies.write(json.dumps(reply).encode() + b"\n")
                replies.flush()


def _reap() -> None:
    """Reap finished orphans once there are many: a function may still ask for its own children's exit codes."""
    with suppress(OSError):
        if len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()) > _MOST_CHILDREN:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _load(message: dict[str, Any]) -> Handler:
    if message["verifier"] in ("code", "code_share"):
        from vapo_megatron.rewards.code import grade_code

        limits = message["response_timeout_s"], message["memory_mib"], message["verifier"] == "code_share"
        return lambda case: grade_code(case["ground_truth"], case["response"], *limits)

    if message["verifier"] == "math":
        from vapo_megatron.rewards.math import Comparison, settle

        importlib.import_module("vapo_megatron.rewards.symbolic")  # the slow import, before the first deadline runs

        def compare(case: dict[str, Any]) -> dict[str, Any]:
            grade = settle(Comparison(case["ground_truth"], case["answer"], case["answer_is_formula"]))
            return {"correct": grade.correct, "reason": grade.reason}

        return compare

    module, _, name = message["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    correct_above = message["correct_above"]

    def score(case: dict[str, Any]) -> dict[str, Any]:
        result = function(case["problem"], case["ground_truth"], case["response"], case["extra"])
        value = float(result)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"score {value} is not finite")
        return {"correct": correct_above is not None and value > correct_above, "reason": "scored", "score": value}

    return score


def _handle(handler: Handler, case: dict[str, Any]) -> dict[str, Any]:
    try:
        return handler(case)
    except MemoryError:
        return {"correct": False, "reason": "memory"}
    except Exception as error:  # a user's function, or sympy on hostile text, may raise anything
        return {"correct": False, "reason": "error", "detail": reason_of(error)}


if __name__ == "__main__":
    main()
