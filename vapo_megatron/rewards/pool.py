"""Verification in processes of their own, which an answer may hang, crash or bloat without harm to the trainer."""

import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.math import FAILED, Comparison, Grade, Reason, prepare
from vapo_megatron.rewards.worker_process import WorkerProcess

OnDone = Callable[[int, Grade], None]

# Workers that may be killed one after the other while they start, before their function is to blame.
_STARTS = 3
_GRACE_SECONDS = 30.0
STARTUP_SECONDS = 60.0  # for a worker to import the verifier


@dataclass(frozen=True, slots=True)
class Case:
    """A response to verify. problem and extra are for a user's function; extra must go into JSON."""

    ground_truth: str
    response: str
    problem: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Batch:
    """Cases that one caller waits for. results: a case's place and grade each, or what it is to raise."""

    results: "SimpleQueue[tuple[int, Grade] | BaseException]" = field(default_factory=SimpleQueue)


@dataclass(eq=False)
class _Job:
    """A case for a worker: whose it is, its place there, the message, whether a worker was killed over it."""

    batch: _Batch
    index: int
    message: dict[str, Any]
    killed: bool = False


class VerifierPool:
    """Grades batches of responses, those of several threads at once.

    Answers that are equal as strings or plain numbers are settled in the caller's thread; the rest goes to worker
    processes, each case under config.response_timeout_s and config.memory_mib. A worker that breaks is replaced and its
    case gets a grade with the reason timeout, memory or crashed. Workers start when they are first needed, and a thread
    that serves them; a user's function is imported at once, so that a wrong path is known before a run starts.

    Raises BadInput if the function cannot be imported, or if workers cannot start within the limits of the config.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()  # over what is waiting and whether it is closed
        self._wake = os.eventfd(0)
        self._server: threading.Thread | None = None
        self._closed = self._told = False
        self._first_failure: Grade | None = None
        self._killed_starting = 0  # workers in a row
        if config.verifier == "function":
            try:
                while not (self._workers and self._workers[0].ready):
                    if not self._workers:
                        self._start_worker()
                    self._wait()
            except BaseException:
                self._kill_workers()
                raise

    def grade_batch(self, cases: Sequence[Case | tuple[str, str]], on_done: OnDone | None = None) -> list[Grade]:
        """The grades on cases, each a Case or (ground_truth, response), in their order.

        on_done(index, grade) is called in this thread as each grade comes.
        """
        grades: dict[int, Grade] = {}

        def done(index: int, grade: Grade) -> None:
            grades[index] = self._with_score(grade)
            self._note_failure(grade)
            if on_done is not None:
                on_done(index, grades[index])

        batch, jobs = _Batch(), []
        places: dict[tuple[object, ...], list[int]] = {}  # of cases that are the same for a worker, which gets one
        for index, texts in enumerate(cases):
            case = texts if isinstance(texts, Case) else Case(*texts)
            prepared = self._prepare(case)
            if isinstance(prepared, Grade):
                done(index, prepared)
                continue
            same = places.setdefault((index,) if self._config.verifier == "function" else tuple(prepared.values()), [])
            same.append(index)
            if len(same) == 1:
                jobs.append(_Job(batch, index, prepared))
        alike = {same[0]: same for same in places.values()}
        try:
            self._submit(jobs)
            for _ in jobs:
                result = batch.results.get()
                if isinstance(result, BaseException):
                    raise result
                for index in alike[result[0]]:
                    done(index, result[1])
        finally:
            with self._lock:  # of a batch that was interrupted nobody waits for the rest
                self._waiting = deque(job for job in self._waiting if job.batch is not batch)
        return [grades[index] for index in range(len(cases))]

    def try_out(self, problem: str, answer: str, extra: Mapping[str, Any] | None = None) -> None:
        """Call a user's function once, with a row whose answer stands for the response; nothing for mathematics.

        Raises:
            BadInput: it failed: it takes other arguments, returns something that is no number, raises, or takes too
                long.
        """
        if self._config.verifier == "function":
            self._told = True  # what it raises is in the refusal
            grade = self.grade_batch([Case(answer, answer, problem=problem, extra=extra or {})])[0]
            self._told = False
            if grade.reason in FAILED:
                self.refuse_function("failed when it was tried with the first row, its answer as the response")

    def refuse_function(self, what: str) -> None:
        """Raises BadInput for a user's function that did `what`, and says how it first failed; nothing otherwise."""
        grade = self._first_failure
        if self._config.verifier == "function" and grade is not None:
            raise BadInput(
                f"reward.function={self._config.function}: {what} ({self._described(grade)}): expected "
                "f(problem, answer, response, extra) -> float | bool within reward.response_timeout_s="
                f"{self._config.response_timeout_s:g} and reward.memory_mib={self._config.memory_mib}, mend it"
            )

    def _described(self, grade: Grade) -> str:
        return grade.detail if grade.reason == "error" else f"{grade.reason} {grade.detail}".strip()

    def _note_failure(self, grade: Grade) -> None:
        if self._config.verifier != "function" or grade.reason not in FAILED:
            return
        self._first_failure = self._first_failure or grade
        if not self._told:
            self._told = True
            print(
                f"vapo-megatron: reward.function={self._config.function} failed on a response "
                f"({self._described(grade)}); it counts as incorrect, and into reward/failed as further ones do",
                file=sys.stderr,
            )

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards; closing twice does nothing."""
        with self._lock:
            closed_before, self._closed = self._closed, True
        if closed_before:
            return
        if self._server is not None:
            os.eventfd_write(self._wake, 1)
            self._server.join()
        self._kill_workers()
        os.close(self._wake)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, case: Case) -> Grade | dict[str, Any]:
        if self._config.verifier != "math":
            if self._config.verifier != "function":
                return {"ground_truth": case.ground_truth, "response": case.response}
            extra = dict(case.extra)
            return {
                "problem": case.problem,
                "ground_truth": case.ground_truth,
                "response": case.response,
                "extra": extra,
            }
        prepared = prepare(case.ground_truth, case.response, self._config.answer_format)
        if isinstance(prepared, Comparison):
            formula = prepared.answer_is_formula
            return {"ground_truth": prepared.ground_truth, "answer": prepared.answer, "answer_is_formula": formula}
        return prepared

    def _with_score(self, grade: Grade) -> Grade:
        if grade.reason == "scored" and self._config.verifier == "function":
            return grade
        if grade.reason == "scored":  # a share of what is correct
            worth = self._config.correct - self._config.incorrect
            return replace(grade, score=self._config.incorrect + worth * grade.score)
        return replace(grade, score=self._config.correct if grade.correct else self._config.incorrect)

    def _start_worker(self) -> None:
        config = self._config
        greeting = {
            "verifier": config.verifier,
            "function": config.function,
            "correct_above": config.correct_above,
            "memory_mib": config.memory_mib,
            "response_timeout_s": config.response_timeout_s,
        }
        self._workers.append(WorkerProcess(greeting, STARTUP_SECONDS))

    def _submit(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if not jobs:
                return
            self._waiting.extend(jobs)
            if self._server is None:
                self._server = threading.Thread(target=self._serve, name="verifiers", daemon=True)
                self._server.start()
            os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        """In a thread of its own: hand cases to workers as they come, until the pool is closed."""
        while not self._closed:
            try:
                self._keep_busy()
                self._wait()
            except Exception as error:
                self._give_up(error)
        self._give_up(RuntimeError("the verifier pool is closed"))

    def _keep_busy(self) -> None:
        """Give waiting cases to workers, of which there are as many as have something to do."""
        for worker in [worker for worker in self._workers if worker.idle and worker.process.poll() is not None]:
            self._workers.remove(worker)  # ended between cases, by no fault of those that wait now
            worker.kill()
        with self._lock:
            busy = sum(worker.job is not None for worker in self._workers)
            while len(self._workers) < min(self._config.workers, len(self._waiting) + busy):
                self._start_worker()
            for worker in self._workers:
                if self._waiting and worker.idle:
                    job = self._waiting.popleft()
                    verifier, seconds = self._config.verifier, self._config.response_timeout_s
                    # Code that takes too long is wrong, and its worker says so.
                    seconds += _GRACE_SECONDS if verifier.startswith("code") else 0.0
                    worker.send(job, job.message, seconds, of_cpu=verifier == "math")

    def _give_up(self, error: BaseException) -> None:
        """Let all who wait raise an error, and begin anew."""
        with self._lock:
            jobs = [*self._waiting, *(worker.job for worker in self._workers if worker.job is not None)]
            self._waiting.clear()
        self._kill_workers()
        for batch in {job.batch for job in jobs}:
            batch.results.put(error)

    def _kill_workers(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def _wait(self) -> None:
        """Wait for something to happen to a worker or for new cases, until the first deadline at most; deal with it."""
        active = [worker for worker in self._workers if not worker.idle]
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ, (None, "wake"))
            for worker in active:
                selector.register(worker.output, selectors.EVENT_READ, (worker, "read"))
                if worker.has_output:
                    selector.register(worker.input, selectors.EVENT_WRITE, (worker, "write"))
            first = min((worker.due for worker in active), default=None)
            events = selector.select(None if first is None else max(0.0, first - time.monotonic()))
        ended: list[WorkerProcess] = []
        for key, _ in events:
            worker, event = key.data
            if event == "wake":
                os.eventfd_read(self._wake)
                continue
            if event == "write":
                worker.write()
                continue
            received = worker.read()
            if received is None:
                ended.append(worker)
                continue
            for message in received:
                self._receive(worker, message)
        for worker in ended:
            self._replace(worker, "crashed")
        now = time.monotonic()
        for worker in [worker for worker in self._workers if not worker.idle and worker.due <= now]:
            if not worker.prolong():
                self._replace(worker, "timeout")

    def _receive(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if not worker.ready:
            if message["status"] == "failed":
                raise self._cannot_start(message["detail"])
            worker.ready, self._killed_starting = True, 0
            return
        assert worker.job is not None
        job, worker.job = worker.job, None
        job.batch.results.put((job.index, Grade(extracted=job.message.get("answer", ""), **message)))

    def _replace(self, worker: WorkerProcess, reason: Reason) -> None:
        """Take a broken worker out; another is started as long as cases wait.

        One that was killed may have been so by no fault of its case or its function: both get another try.
        """
        self._workers.remove(worker)
        worker.kill()
        code = worker.process.returncode
        killed = reason == "crashed" and code is not None and code < 0
        if not worker.ready:
            self._killed_starting += 1
            if killed and self._killed_starting < _STARTS:
                return
            slow = f"did not start in {STARTUP_SECONDS:g} s"
            raise self._cannot_start(slow if reason == "timeout" else f"ended with code {code}")
        if (job := worker.job) is not None:
            if killed and not job.killed:
                job.killed = True
                with self._lock:
                    self._waiting.appendleft(job)
                return
            detail = f"worker ended with code {code}" if reason == "crashed" else ""
            job.batch.results.put((job.index, Grade(False, reason, job.message.get("answer", ""), detail=detail)))

    def _cannot_start(self, detail: str) -> BadInput:
        if self._config.function is not None:
            return BadInput(
                f"reward.function={self._config.function}: a verifier worker cannot load it ({detail}); "
                "give package.module:name of an importable function that fits into "
                f"reward.memory_mib={self._config.memory_mib}"
            )
        return BadInput(
            f"reward.memory_mib={self._config.memory_mib}: a verifier worker could not start ({detail}); give more"
        )
