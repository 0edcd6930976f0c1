"""The pool's end of one verifier process."""

import os
import subprocess
import sys
import time
from collections import deque
from typing import Any

import psutil

from vapo_megatron.rewards.worker import Decoder, encode
from vapo_megatron.signals import end_tree, stop_signals_blocked

# A case that is limited in processor time may take this many times as long by the clock.
_PATIENCE = 10


class WorkerProcess:
    """A verifier process and what it is doing.

    It is started with nothing of the trainer but two pipes. job is what the pool knows of the case that it works on,
    None while it starts or waits; due is when it must have answered (time.monotonic seconds).
    """

    def __init__(self, greeting: dict[str, Any], startup_timeout_s: float) -> None:
        # The child must find what we find (a user's function, an uninstalled checkout), whatever way we found it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with stop_signals_blocked():  # which are sent to every process of a job; the worker ends when we do
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vapo_megatron.rewards.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # what a user's function starts ends with it
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input = self.process.stdin.fileno()
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self._outgoing: deque[bytes] = deque()
        self._decoder = Decoder()
        self.ready = False
        self.job: Any = None
        self._sent_at = self._cpu_limit = self._cpu_before = 0.0
        self.due = time.monotonic() + startup_timeout_s
        self._outgoing.append(encode(greeting))

    @property
    def idle(self) -> bool:
        """Whether it has started and waits for a case."""
        return self.ready and self.job is None

    @property
    def has_output(self) -> bool:
        """Whether a part of what it was sent has not gone into its pipe yet."""
        return bool(self._outgoing)

    def send(self, job: Any, message: dict[str, Any], response_timeout_s: float, of_cpu: bool) -> None:
        """Give it a case. of_cpu: the time is that of its processor, which other work of the machine does not use."""
        self.job = job
        self._sent_at = time.monotonic()
        self._cpu_limit, self._cpu_before = (response_timeout_s, self._cpu_seconds()) if of_cpu else (0.0, 0.0)
        self.due = self._sent_at + response_timeout_s
        self._outgoing.append(encode(message))

    def prolong(self) -> bool:
        """Once it is due: whether it has not had its processor time yet; then it is due later."""
        left = self._cpu_before + self._cpu_limit - self._cpu_seconds()  # below 0 where it is not of CPU
        last = self._sent_at + _PATIENCE * self._cpu_limit
        if left <= 0 or self.due >= last:
            return False
        self.due = min(time.monotonic() + max(left, 0.05), last)
        return True

    def _cpu_seconds(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:  # it has ended: read() tells
            return float("inf")
        return float(times.user + times.system)

    def write(self) -> None:
        """Push what is waiting into the pipe as far as it goes. A dead worker is noticed by read."""
        try:
            while self._outgoing:
                written = os.write(self.input, self._outgoing[0])
                if written < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][written:]
                    return
                self._outgoing.popleft()
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outgoing.clear()

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived, or None if it has ended or talks nonsense."""
        try:
            piece = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        if not piece:
            return None
        try:
            return self._decoder.feed(piece)
        except ValueError:
            return None

    def kill(self) -> None:
        """End it now, with all that it has started, and wait for it."""
        if self.process.returncode is None:  # nobody has waited for it: its number is still its own
            end_tree(self.process.pid)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
