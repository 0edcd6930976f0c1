"""Verification in processes of their own, which an answer may hang, crash or bloat without harm to the trainer."""

import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.math import FAILED, Comparison, Grade, Reason, prepare
from vapo_megatron.rewards.worker_process import WorkerProcess

OnDone = Callable[[int, Grade], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A response to verify. problem and extra are for a user's function; extra must go into JSON."""

    ground_truth: str
    response: str
    problem: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class VerifierPool:
    """Grades batches of responses.

    Answers that are equal as strings or plain numbers are settled here; the rest goes to worker processes, each case
    under config.response_timeout_s and config.memory_mib. A worker that breaks is replaced and its case gets a grade
    with the reason timeout, memory or crashed. Workers start when they are first needed; a user's function is imported
    at once, so that a wrong path is known before a run starts.

    Raises BadInput if the function cannot be imported, or if workers cannot start within the limits of the config.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: list[WorkerProcess] = []
        self._lock = threading.Lock()  # batches from several threads take turns
        self._closed = False
        self._told = False
        if config.verifier == "function":
            with self._lock:
                self._start_worker()
                self._serve(deque(), {}, lambda index, grade: None)

    def grade_batch(self, cases: Sequence[Case | tuple[str, str]], on_done: OnDone | None = None) -> list[Grade]:
        """The grades on cases, each a Case or (ground_truth, response), in their order.

        on_done(index, grade) is called in this thread as each grade comes.
        """
        grades: dict[int, Grade] = {}

        def done(index: int, grade: Grade) -> None:
            grades[index] = self._with_score(grade)
            self._tell_of_first_failure(grade)
            if on_done is not None:
                on_done(index, grades[index])

        waiting: deque[int] = deque()
        messages: dict[int, dict[str, Any]] = {}
        for index, given in enumerate(cases):
            case = given if isinstance(given, Case) else Case(*given)
            prepared = self._prepare(case)
            if isinstance(prepared, Grade):
                done(index, prepared)
            else:
                waiting.append(index)
                messages[index] = prepared
        if waiting:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the verifier pool is closed")
                self._serve(waiting, messages, done)
        return [grades[index] for index in range(len(cases))]

    def try_out(self, problem: str, answer: str) -> None:
        """Call a user's function once, with a row whose answer stands for the response; nothing for mathematics.

        Raises:
            BadInput: it failed: it takes other arguments, returns something that is no number, raises, or takes too
                long.
        """
        if self._config.verifier == "function":
            self._told = True  # what it raises is in the refusal
            grade = self.grade_batch([Case(answer, answer, problem=problem)])[0]
            self._told = False
            if grade.reason in FAILED:
                self.refuse_function("failed when it was tried with the first row, its answer as the response", grade)

    def refuse_function(self, what: str, grade: Grade) -> None:
        """Raises BadInput for a user's function that did `what`; grade says how. Nothing for mathematics."""
        if self._config.verifier == "function":
            raise BadInput(
                f"reward.function={self._config.function}: {what} ({self._described(grade)}): expected "
                "f(problem, answer, response, extra) -> float | bool within reward.response_timeout_s="
                f"{self._config.response_timeout_s:g} and reward.memory_mib={self._config.memory_mib}, mend it"
            )

    def _described(self, grade: Grade) -> str:
        return grade.detail if grade.reason == "error" else f"{grade.reason} {grade.detail}".strip()

    def _tell_of_first_failure(self, grade: Grade) -> None:
        if self._config.verifier == "function" and grade.reason in FAILED and not self._told:
            self._told = True
            print(
                f"vapo-megatron: reward.function={self._config.function} failed on a response "
                f"({self._described(grade)}); it counts as incorrect, and into reward/failed as further ones do",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards; closing twice does nothing."""
        with self._lock:
            self._closed = True
            while self._workers:
                self._workers.pop().kill()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, case: Case) -> Grade | dict[str, Any]:
        if self._config.verifier == "function":
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
        if grade.reason == "scored":
            return grade
        return replace(grade, score=self._config.correct if grade.correct else self._config.incorrect)

    def _start_worker(self) -> None:
        config = self._config
        greeting = {
            "function": config.function,
            "correct_above": config.correct_above,
            "memory_mib": config.memory_mib,
            "response_timeout_s": config.response_timeout_s,
        }
        self._workers.append(WorkerProcess(greeting, config.startup_timeout_s))

    def _serve(self, waiting: deque[int], messages: dict[int, dict[str, Any]], done: OnDone) -> None:
        """Work off the waiting cases, and wait for workers that are starting if there are none."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)  # ended between batches, by no fault of the cases that wait now
            worker.kill()
        try:
            while waiting or any(worker.case is not None for worker in self._workers) or self._only_starting():
                while len(self._workers) < min(self._config.workers, len(waiting) + self._busy()):
                    self._start_worker()
                for worker in self._workers:
                    if waiting and worker.idle:
                        index = waiting.popleft()
                        worker.send(index, messages[index], self._config.response_timeout_s)
                self._wait(messages, done)
        except BaseException:
            # An interrupted batch leaves workers in the middle of cases that nobody waits for.
            while self._workers:
                self._workers.pop().kill()
            raise

    def _busy(self) -> int:
        return sum(worker.case is not None for worker in self._workers)

    def _only_starting(self) -> bool:
        return bool(self._workers) and not any(worker.ready for worker in self._workers)

    def _wait(self, messages: dict[int, dict[str, Any]], done: OnDone) -> None:
        """Wait for something to happen to a worker, until the first deadline at most, and deal with it."""
        active = [worker for worker in self._workers if not worker.idle]
        with selectors.DefaultSelector() as selector:
            for worker in active:
                selector.register(worker.output, selectors.EVENT_READ, (worker, "read"))
                if worker.has_output:
                    selector.register(worker.input, selectors.EVENT_WRITE, (worker, "write"))
            timeout = max(0.0, min(worker.due for worker in active) - time.monotonic())
            events = selector.select(timeout)
        ended: list[WorkerProcess] = []
        for key, _ in events:
            worker, what = key.data
            if what == "write":
                worker.write()
                continue
            received = worker.read()
            if received is None:
                ended.append(worker)
                continue
            for message in received:
                self._receive(worker, message, messages, done)
        for worker in ended:
            self._replace(worker, "crashed", messages, done)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if not worker.idle and worker.due <= now]:
            self._replace(worker, "timeout", messages, done)

    def _receive(
        self, worker: WorkerProcess, message: dict[str, Any], messages: dict[int, dict[str, Any]], done: OnDone
    ) -> None:
        if not worker.ready:
            if message["status"] == "failed":
                raise self._cannot_start(message["detail"])
            worker.ready = True
            return
        assert worker.case is not None
        index, worker.case = worker.case, None
        done(index, Grade(extracted=messages[index].get("answer", ""), **message))

    def _replace(
        self, worker: WorkerProcess, reason: Reason, messages: dict[int, dict[str, Any]], done: OnDone
    ) -> None:
        """Take a broken worker out; another is started as long as cases wait."""
        self._workers.remove(worker)
        worker.kill()
        code = worker.process.returncode
        if not worker.ready:
            ended = "did not start in reward.startup_timeout_s" if reason == "timeout" else f"ended with code {code}"
            raise self._cannot_start(f"{ended}={self._config.startup_timeout_s:g}" if reason == "timeout" else ended)
        if worker.case is not None:
            detail = f"worker ended with code {code}" if reason == "crashed" else ""
            answer = messages[worker.case].get("answer", "")
            done(worker.case, Grade(False, reason, answer, detail=detail))

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
