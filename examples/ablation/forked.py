"""Commands in forks of this process, and the engine that they share."""

import json
import multiprocessing
import os
import re
import resource
import runpy
import secrets
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

from examples.ablation.plan import ROOT
from vapo_megatron.errors import RunFailed
from vapo_megatron.files import atomic_write

TERMINATE_SECONDS = 30
ENGINE_SECONDS = 600
_POLL_SECONDS = 0.2
_KEY_VARIABLE = "VAPO_ABLATION_KEY"
_SAYS = re.compile(r"engine at (http://[^,\s]+),")


class Forked:
    """`python -m MODULE ARGUMENTS...` in a fork of this process: what this process has imported is
    there already.

    Attributes:
        log: what it prints, and beside it what it used of the processor.
    """

    def __init__(self, argv: tuple[str, ...], log: Path) -> None:
        """Start it."""
        self.log, self._used = log, log.with_suffix(".cpu")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._used.unlink(missing_ok=True)
        log.write_bytes(
            b""
        )  # here, lest an earlier command's words are read before the fork opens it
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(argv, log, self._used)
        )
        self._process.start()

    @property
    def exitcode(self) -> int | None:
        """As of a process; None while it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def cpu_seconds(self) -> float:
        """Of the command and of all processes that it waited for; 0 where it was killed."""
        return json.loads(self._used.read_text()) if self._used.is_file() else 0.0

    def end(self) -> None:
        """Tell it to end, and wait for that."""
        self._process.terminate()
        self._process.join(TERMINATE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def import_program() -> None:
    """Import what jobs need, for all forks to come."""
    warnings.simplefilter("ignore")  # libraries' advice to their developers, as in every command
    import vapo_megatron.checks.preflight
    import vapo_megatron.operations.report.report
    import vapo_megatron.run.rank
    import vapo_megatron.training.sft  # noqa: F401


def _run(argv: tuple[str, ...], log: Path, used: Path) -> None:
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, handler)
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        for source, target in ((nothing.fileno(), 0), (file.fileno(), 1), (file.fileno(), 2)):
            os.dup2(source, target)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    os.chdir(ROOT)
    sys.argv = list(argv)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        found = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        with atomic_write(used) as out:
            json.dump(sum(each.ru_utime + each.ru_stime for each in found), out)


def engine_key() -> str:
    """The override that names the key of engines and jobs, which this process makes."""
    os.environ.setdefault(_KEY_VARIABLE, secrets.token_hex(32))
    return f"rollout.api_key_variable={_KEY_VARIABLE}"


def of_engine(url: str) -> tuple[str, ...]:
    """The overrides that send a job's requests to a shared engine."""
    return (f"rollout.external_urls=[{url}]", engine_key())


class SharedEngine:
    """An engine that serves one job after another; another one takes its place where a job needs
    another kind."""

    def __init__(self, log: Path) -> None:
        """Nothing is started yet."""
        self._log = log
        self._argv: tuple[str, ...] = ()
        self._process: Forked | None = None
        self._url = ""

    def serving(self, argv: tuple[str, ...]) -> str:
        """URL of the engine that a command (`vapo_megatron.cli engine ...`) starts, which is
        started if need be.

        Raises:
            RunFailed: it does not start.
        """
        if self._process is None or not self._process.is_alive() or argv != self._argv:
            self.close()
            self._process, self._argv = Forked((*argv, engine_key()), self._log), argv
            self._url = self._wait()
        return self._url

    def _wait(self) -> str:
        assert self._process is not None
        end = time.monotonic() + ENGINE_SECONDS
        while self._process.is_alive() and time.monotonic() < end:
            if found := _SAYS.search(
                self._log.read_text(errors="replace") if self._log.is_file() else ""
            ):
                return found[1]
            time.sleep(_POLL_SECONDS)
        raise RunFailed(f"{self._log}: the engine did not start")

    def cpu_seconds(self) -> float:
        """That its processes have used so far."""
        if self._process is None or not self._process.is_alive():
            return 0.0
        root = psutil.Process(self._process.pid)
        return sum(_used(process) for process in (root, *root.children(recursive=True)))

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.end()
        self._process = None


def _used(process: psutil.Process) -> float:
    try:
        times: Any = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
