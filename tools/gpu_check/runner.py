"""Running checks one after the other: each in a process group of its own, with a limit; a failure
ends no other."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.gpu_check.checks import Check

Status = Literal["ok", "not checked", "over its limit", "failed"]
# From the best to the worst. What was not checked may be broken: that is worse than what has
# passed.
_ORDER: tuple[Status, ...] = ("ok", "not checked", "over its limit", "failed")
_EXIT_CODES: dict[Status, int] = {"ok": 0, "not checked": 3, "over its limit": 1, "failed": 1}
# Of the budget: for the page of results, and the least that a check is begun with.
_RESERVE = 8.0
_LEAST = 20.0
_GRACE = 5.0
_LINE = 200


@dataclass(frozen=True)
class Result:
    """What came of a check: line is what it said, or why it was not run; log its output, where it
    has one."""

    check: Check
    status: Status
    seconds: float
    line: str
    log: Path | None = None


def exit_code(results: Sequence[Result]) -> int:
    """By the worst: 0 all have passed, 1 one failed or ran past its limit, 3 none of that, but not
    all were checked."""
    worst: Status = max([result.status for result in results] or ["not checked"], key=_ORDER.index)
    return _EXIT_CODES[worst]


def run_all(
    checks: Sequence[Check],
    logs: Path,
    environment: Mapping[str, str],
    *,
    root: Path,
    budget: float | None,
    has_gpu: bool,
    tell: Callable[[Result], None],
) -> list[Result]:
    """Run checks in their order; tell is called with each result as it comes.

    Args:
        logs: folder for the output of each.
        environment: of the processes.
        root: of the repository, where they run.
        budget: seconds for all of them; what could not end within it is cut short, or not begun.
        has_gpu: without, checks that need a GPU are not run.
    """
    began = time.monotonic()
    results = []
    for check in checks:
        left = float("inf") if budget is None else budget - (time.monotonic() - began) - _RESERVE
        if check.gpu and not has_gpu:
            result = Result(check, "not checked", 0.0, "needs a GPU that PyTorch can use")
        elif left < _LEAST:
            result = Result(
                check, "not checked", 0.0, f"no time left of the budget of {budget:g} s"
            )
        else:
            result = run(
                check, logs / f"{check.name}.log", environment, root, min(check.limit, left)
            )
        tell(result)
        results.append(result)
    return results


def run(
    check: Check, log: Path, environment: Mapping[str, str], root: Path, limit: float
) -> Result:
    """Run one check for at most `limit` seconds; nothing of it is left when this returns."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *check.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=root,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - started
    said = log.read_text(errors="replace").splitlines()
    if code is None:
        return Result(
            check, "over its limit", seconds, f"ended after {limit:.0f} s; last: {_last(said)}", log
        )
    if code:
        return Result(check, "failed", seconds, f"exit code {code}: {_last(said)}", log)
    if not check.expects:
        return Result(check, "ok", seconds, _last(said), log)
    found = [line.strip() for line in said if re.search(check.expects, line)]
    if not found:
        return Result(
            check,
            "failed",
            seconds,
            f"said nothing like {check.expects!r}; last: {_last(said)}",
            log,
        )
    return Result(check, "ok", seconds, found[-1][:_LINE], log)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process's group, by force where asking does not do."""
    for number, wait in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _last(lines: Sequence[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    return told[-1][:_LINE] if told else "nothing"
