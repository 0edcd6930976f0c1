"""User functions for the tests of the pool: they do to a worker what the response says."""

import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def obey(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> float | bool:
    print("printed by a verifier")  # must not reach the pipe that replies go through
    print("printed by a verifier", file=sys.stderr)  # nor the trainer's log, once a response
    if response.startswith("leave a child, "):
        child = subprocess.Popen(["sleep", "600"])
        Path(extra["pid_file"]).write_text(str(child.pid))
        response = response.removeprefix("leave a child, ")
    if response.startswith("leave daemons, "):
        for _ in range(int(extra["daemons"])):
            leave_daemon(extra["pid_file"])
        response = response.removeprefix("leave daemons, ")
    if response == "hang":
        time.sleep(600)
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(0)
    if response == "allocate":
        bytearray(64 << 30)
    if response == "share":
        shared = mmap.mmap(-1, 900 << 20)  # no limit of the kernel's counts it
        for place in range(0, len(shared), mmap.PAGESIZE):
            shared[place] = 1
        time.sleep(30)
    if response == "raise memory":
        raise MemoryError
    if response == "limits":
        # MiB of memory, of a core file; what it may read
        found = (
            resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20,
            *resource.getrlimit(resource.RLIMIT_CORE),
        )
        raise ValueError(f"{found} {os.read(0, 9)!r}")
    if response == "raise":
        raise KeyError("no such\nkey")
    if response == "pid":
        return float(os.getpid())
    if "score" in extra:
        return float(extra["score"])
    return problem + response == answer


def orphans(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> float:
    """Leave processes whose parents are gone and which end by themselves; how many of them are
    still to be reaped at last."""
    for _ in range(int(extra["orphans"])):
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            os.fork()
            os._exit(0)
    supervisor = psutil.Process().parent()
    assert supervisor is not None
    deadline = time.monotonic() + 120
    while (left := len(supervisor.children()) - 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    return float(left)


def leave_daemon(pid_file: str) -> None:
    """A process in a session of its own whose parent is gone: what daemon(3) does, and a careless
    `setsid ... &`."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if daemon := os.fork():
        with Path(pid_file).open("a") as file:
            file.write(f"{daemon} ")
        os._exit(0)
    os.execlp("sleep", "sleep", "600")


if (_mark := Path(os.environ.get("KILLED_AT_IMPORT", "/dev/null"))) and not _mark.exists():
    with (_times := _mark.with_suffix(".times")).open("a") as _file:
        _file.write("x")
    if _mark.name == "import":
        _mark.touch()
    if _mark.name != "twice" or len(_times.read_text()) % 3:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_once(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    mark = Path(response)
    if mark.name != "always" and mark.exists():
        return True
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def slow(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    time.sleep(float(response))
    return True


def noted(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    with Path(answer).open("a") as lines:
        lines.write(response)
    if problem == "exit":
        os._exit(0)
    time.sleep(float(problem))
    return True


NOT_CALLABLE = 3


def of_two(answer: str, response: str) -> bool:
    return answer == response


def text(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> str:
    return "good"


def raises(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    return bool(extra["gold"])


def raises_on_fail(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    if response == "fail":
        raise LookupError("on the way")
    return True


def half_for_what_was_cut(
    problem: str, answer: str, response: str, extra: Mapping[str, Any]
) -> float:
    return 0.25 if extra.get("truncated") else 1.0


def with_torch(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> float:
    """As a function that imports torch and transformers does. The CUDA build maps some gigabytes
    of its libraries' files, and its driver reserves address space: so does this."""
    import torch
    import transformers

    with Path(extra["library"]).open("rb") as library:
        mapped = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ)
        reserved = mmap.mmap(-1, 16 << 30, prot=0)
    assert transformers.__version__ and mapped[0] == 0
    reserved.close()
    return float(torch.ones(3).sum())
