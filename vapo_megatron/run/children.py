"""Processes that a run's starter starts: how they end with it, and how it ends them."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from vapo_megatron import logs
from vapo_megatron.signals import end_with_parent

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
