"""The verifier processes of one config. Grading continues whatever an answer does to one of
them."""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.verifiers import LARGEST_REWARD
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.grade import Grade
from vapo_megatron.rewards.verifier import verifier_of
from vapo_megatron.rewards.worker import END_SIGNAL
from vapo_megatron.signals import end_tree, stop_signals_blocked

STARTUP_SECONDS = 60.0  # for a worker to import the verifier
# Workers in a row that may be killed while they start, before their function is to blame.
_STARTS = 3
_PATIENCE = (
    10  # a case that is limited in processor time may take this many times as long by the clock
)
_END_SECONDS = 5.0  # for a supervisor to end everything; one that is stopped is killed
_LOOK_SECONDS = 0.25  # between two looks at the memory of a worker that is at work
_KIB = 1 << 10
# A worker grades one response at a time, and each thread of a library's pool costs it memory.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """A verifier process, which shares nothing with this one but a socket. One thread at a time
    asks it."""

    def __init__(self) -> None:
        # The child must find what we find (a user's function, an uninstalled checkout), whatever
        # way we found it.
        threads = dict.fromkeys(_ONE_THREAD, "1")
        environment = {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._socket, its_end = socket.socketpair()
        # Which are sent to every process of a job; the worker ends when we do
        with (
            its_end,
            stop_signals_blocked(),
        ):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vapo_megatron.rewards.worker", str(os.getpid())],
                stdin=its_end.fileno(),
                stdout=its_end.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # what a user's function starts ends with it
            )
        self._replies = self._socket.makefile("rb")
        # select() takes no descriptor above 1023, and a trainer holds thousands of connections
        self._ready = select.poll()
        self._ready.register(self._socket, select.POLLIN)
        self._ending = threading.Lock()
        self._hung_up = False

    def ask(
        self, message: dict[str, Any], seconds: float, memory_mib: int, of_cpu: bool = False
    ) -> dict[str, Any]:
        """Send a message and return the reply. of_cpu: `seconds` of the worker's processor time,
        whatever else the machine does.

        Raises:
            TimeoutError: it did not reply in time.
            MemoryError: it holds more than memory_mib.
            OSError, ValueError: it has ended, or its reply is no JSON object.
        """
        due = time.monotonic() + seconds
        last = due + (_PATIENCE - 1) * seconds * of_cpu
        cpu_limit = self._cpu_seconds() + seconds if of_cpu else 0.0
        self._socket.settimeout(seconds)
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        while True:
            wait = min(max(0.0, due - time.monotonic()), _LOOK_SECONDS)
            if self._ready.poll(1000 * wait):
                break
            if (held := self._held_mib()) > memory_mib:
                raise MemoryError(f"{held} MiB, above reward.memory_mib={memory_mib}")
            if time.monotonic() < due:
                continue
            left = cpu_limit - self._cpu_seconds() if of_cpu else 0.0
            if left <= 0 or due >= last:
                raise TimeoutError
            due = min(time.monotonic() + max(left, 0.05), last)
        if not (line := self._replies.readline()):
            self._hung_up = True
            raise ConnectionError
        if not isinstance(reply := json.loads(line), dict):
            raise ValueError
        return reply

    @property
    def worker(self) -> int:
        """The process that runs the verifier, the first child of its supervisor."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def _held_mib(self) -> int:
        """Resident memory that is not of files: shared memory too, which no limit counts."""
        kib = 0
        with suppress(OSError):  # it has ended, which its socket says
            for line in Path(f"/proc/{self.worker}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    kib += int(line.split()[1])
        return kib // _KIB

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self.worker).cpu_times()
        return float(times.user + times.system)

    def kill(self) -> int:
        """Kill it with everything it has started, and wait for it; returns its exit code."""
        with self._ending:
            # Nobody has waited for it: its number is still its own
            if self.process.returncode is None:
                if not self._hung_up:  # else it is ending, and its code says how
                    self.process.send_signal(END_SIGNAL)
                with suppress(subprocess.TimeoutExpired):
                    return self.process.wait(_END_SECONDS)
                end_tree(self.process.pid)
            return self.process.wait()

    def close(self) -> None:
        """Kill it and close the connection; called by the thread that asked it."""
        self.kill()
        self._replies.close()
        self._socket.close()


class Workers:
    """Gives each case to a separate process, and starts processes as cases need them.

    A process that breaks is replaced, and its case gets a grade with the reason timeout, memory or
    crashed. If the process was killed, the case is tried once more: something else may have killed
    it.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        verifier = verifier_of(config)
        self._seconds = config.response_timeout_s + verifier.grace_s
        self._of_cpu = verifier.limits_cpu_time
        # A process ends with the thread that starts it
        self._threads = ThreadPoolExecutor(config.workers, "verifier")
        self._lock = threading.Lock()  # over what follows
        self._closed = False
        self._idle: list[WorkerProcess] = []
        self.processes: list[WorkerProcess] = []

    def start(self) -> None:
        """Start one process. Raises BadInput if it cannot load the verifier."""
        self._threads.submit(lambda: self._rest(self._take())).result()

    def submit(self, message: dict[str, Any]) -> "Future[Grade]":
        """A future of the grade on a case. It raises BadInput if no process can be started."""
        return self._threads.submit(self._verify, message)

    def close(self) -> None:
        """End all processes; whoever waits for a grade gets an error."""
        with self._lock:
            self._closed = True
            workers = list(self.processes)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        while self.processes:
            self.processes.pop().close()

    def _verify(self, message: dict[str, Any]) -> Grade:
        answer = message.get("answer", "")
        code = 0
        for _ in range(2):
            worker = self._take()
            try:
                reply = worker.ask(message, self._seconds, self._config.memory_mib, self._of_cpu)
                grade = Grade(**({"extracted": answer} | reply))
                if not abs(grade.score) <= LARGEST_REWARD:
                    raise ValueError(f"score {grade.score}")
            except TimeoutError:
                self._end(worker)
                return Grade(False, "timeout", answer)
            except MemoryError as error:
                self._end(worker)
                return Grade(False, "memory", answer, detail=str(error))
            except (OSError, ValueError, TypeError, psutil.Error):
                if (code := self._end(worker)) >= 0:
                    break
            else:
                self._rest(worker)
                return grade
        return Grade(False, "crashed", answer, detail=f"worker ended with code {code}")

    def _take(self) -> WorkerProcess:
        """An idle process, or a new one that has loaded the verifier."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._started()
            if worker.process.poll() is None:
                return worker
            self._end(worker)  # it ended between cases, by no fault of the one that waits now

    def _rest(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._idle.append(worker)

    def _end(self, worker: WorkerProcess) -> int:
        worker.close()
        with self._lock:
            self.processes.remove(worker)
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
        return worker.process.returncode

    def _started(self) -> WorkerProcess:
        code = 0
        for _ in range(_STARTS):
            with self._lock:
                if self._closed:
                    raise RuntimeError("the verifier pool is closed")
                worker = WorkerProcess()
                self.processes.append(worker)
            try:
                failure = worker.ask(
                    self._config.model_dump(mode="json"), STARTUP_SECONDS, self._config.memory_mib
                ).get("failed")
            except TimeoutError:
                failure = f"did not start in {STARTUP_SECONDS:g} s"
            except MemoryError as error:
                failure = f"holds {error}"
            except (OSError, ValueError):
                if (code := self._end(worker)) < 0:
                    continue
                break
            if failure is None:
                return worker
            self._end(worker)
            raise self._cannot_start(failure)
        raise self._cannot_start(f"ended with code {code}")

    def _cannot_start(self, detail: str) -> BadInput:
        if self._config.function is not None:
            return BadInput(
                f"reward.function={self._config.function}: a verifier worker cannot load it "
                f"({detail}); give package.module:name of an importable function that fits into "
                f"reward.memory_mib={self._config.memory_mib}"
            )
        return BadInput(
            f"reward.memory_mib={self._config.memory_mib}: a verifier worker could not start "
            f"({detail}); give more"
        )
