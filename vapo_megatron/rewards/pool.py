"""Verification in processes of their own, which an answer may hang, crash or bloat without harm to the trainer."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, as_completed
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.math import FAILED, Comparison, Grade, prepare
from vapo_megatron.rewards.workers import Workers

OnDone = Callable[[int, Grade], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A response to verify. problem and extra are for a user's function; extra must go into JSON."""

    ground_truth: str
    response: str
    problem: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class VerifierPool:
    """Grades batches of responses, those of several threads at once.

    Answers that are equal as strings or plain numbers are settled in the caller's thread; the rest goes to worker
    processes (rewards.workers), which start when they are first needed; a user's function is imported at once, so that
    a wrong path is known before a run starts.

    Raises BadInput if the function cannot be imported, or if workers cannot start within the limits of the config.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._closed = self._told = False
        self._first_failure: Grade | None = None
        self.workers = Workers(config)
        if config.verifier == "function":
            try:
                self.workers.start()
            except BaseException:
                self.close()
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

        if self._closed:
            raise RuntimeError("the verifier pool is closed")
        alike: dict[tuple[object, ...], list[int]] = {}  # cases that are the same for a worker, which gets one
        messages = []
        for index, texts in enumerate(cases):
            prepared = self._prepare(texts if isinstance(texts, Case) else Case(*texts))
            if isinstance(prepared, Grade):
                done(index, prepared)
                continue
            same = alike.setdefault((index,) if self._config.verifier == "function" else tuple(prepared.values()), [])
            same.append(index)
            if len(same) == 1:
                messages.append(prepared)
        places = {self.workers.submit(message): same for message, same in zip(messages, alike.values(), strict=True)}
        try:
            for future in as_completed(places):
                for index in places[future]:
                    done(index, future.result())
        except CancelledError:
            raise RuntimeError("the verifier pool is closed") from None
        finally:
            for future in places:  # of a batch that was interrupted nobody waits for the rest
                future.cancel()
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
        if not self._closed:
            self._closed = True
            self.workers.close()

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
