"""Processes that a run's starter starts: how they end with it, and how it ends them."""

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

from vapo_megatron import logs
from vapo_megatron.engines.inside.heartbeat import stands_still
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.signals import end_with_parent, stop_signals_blocked

_logger = logging.getLogger(__name__)

_PR_SET_NAME = 15
_GRACE_SECONDS = 15
# How the starter ends its processes; the stop signals ask for a save first.
_END_NOW = signal.SIGUSR2


def begin_child(level: logs.LogLevel) -> None:
    """First thing in a child: it ends with its starter, however that one ends, and in order where that one asks.

    `ps -e` and `top` show its name.
    """
    # What this process was forked with is never collected: the end of a process group waits for threads that only its
    # own process has.
    gc.freeze()
    end_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, multiprocessing.current_process().name.encode())
    logs.configure(level)  # a spawned process does not have it yet
    # Ctrl-C reaches the whole terminal group; the starter turns it into one orderly end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(_END_NOW, lambda *_: sys.exit(143))


def end_children(children: Iterable[Any]) -> None:
    """End processes in order, and those that do not by force."""
    children = list(children)
    for child in children:
        if child.is_alive():
            os.kill(child.pid, _END_NOW)
            os.kill(child.pid, signal.SIGCONT)  # one that is stopped would not hear of it
    for child in children:
        child.join(_GRACE_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()


class Companion:
    """A process beside the ranks, which outlives them. Use as a context manager; nothing runs before ensure()."""

    def __init__(self, body: Callable[[], None], name: str) -> None:
        self._body, self._name = body, name
        self._process: Any = None

    def ensure(self, hangs: bool = False) -> None:
        """Have it running, anew where it was killed, is stopped, or hangs."""
        if self._process is not None:
            state = "hanging" if hangs else stands_still(self._process.pid)
            if state is None:
                return
            _logger.warning("%s (process %d) is ended, as it is %s", self._name, self._process.pid, state)
            self._process.kill()  # in order it would take a while, if it can at all
            self._process.join()
        context: Any = multiprocessing.get_context(current_platform().start_method)
        self._process = context.Process(target=_run, args=(self._body, logs.configured_level()), name=self._name)
        with stop_signals_blocked():  # they are for ranks
            self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_children([self._process])


def _run(body: Callable[[], None], level: logs.LogLevel) -> None:
    begin_child(level)
    body()
