"""Verifies responses in separate processes, which an answer may hang, crash or bloat without harm to the trainer."""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.rewards.code import check_tests
from vapo_megatron.rewards.extract import final_part
from vapo_megatron.rewards.math import FAILED, Grade, prepare
from vapo_megatron.rewards.workers import Workers

if TYPE_CHECKING:  # tools that grade have no use for torch
    from vapo_megatron.data.sample import Prompt

OnDone = Callable[[int, Grade], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A response to verify. extra is for a user's function and must go into JSON; reward is Prompt.reward."""

    ground_truth: str
    response: str
    problem: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    reward: str = ""


class _Verifier:
    """The verifier that one config describes."""

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._kind = config, config.verifier
        self._name = f"reward.{'function' if config.function else 'verifier'}={config.function or config.verifier}"
        self.first_failure: Grade | None = None
        self.is_silent = False
        if config.judge is not None and self._kind == "judge":
            from vapo_megatron.rewards.judge import Judge  # the client takes a second to import

            self._name = f"reward.judge.url={config.judge.url}"
            self.workers: Workers | Judge = Judge(config)
            return
        self.workers = Workers(config)
        if self._kind == "function":
            try:
                self.workers.start()
            except BaseException:
                self.workers.close()
                raise

    def prepare(self, case: Case) -> Grade | dict[str, Any]:
        """The grade if no process is needed, else the message to a process or to the judge."""
        if self._kind == "math":
            prepared = prepare(case.ground_truth, case.response, self._config.answer_format)
            return prepared if isinstance(prepared, Grade) else asdict(prepared)
        message = {"ground_truth": case.ground_truth, "response": case.response}
        if self._kind.startswith("code"):
            return message
        if self._kind == "judge":
            answer = final_part(case.response).strip()
            return message | {"problem": case.problem, "response": answer} if answer else Grade(False, "no_answer")
        return message | {"problem": case.problem, "extra": dict(case.extra)}

    def key(self, index: int, message: dict[str, Any]) -> tuple[object, ...]:
        """The same for all cases of a batch that share a grade."""
        return (id(self), index) if "extra" in message else (id(self), *message.values())

    def scored(self, grade: Grade) -> Grade:
        """The grade with its reward. The first failure is printed."""
        if grade.reason in FAILED and self._kind not in ("math", "code", "code_share"):
            self.first_failure = self.first_failure or grade
            if not self.is_silent:
                self.is_silent = True
                print(
                    f"vapo-megatron: {self._name} failed on a response ({_described(grade)}); it counts as incorrect, "
                    "and into reward/failed as further ones do",
                    file=sys.stderr,
                )
        correct, incorrect = self._config.correct, self._config.incorrect
        if grade.reason != "scored":
            return replace(grade, score=correct if grade.correct else incorrect)
        # A share of what is correct, unless it is the reward itself.
        return (
            grade if self._kind == "function" else replace(grade, score=incorrect + (correct - incorrect) * grade.score)
        )

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Raise BadInput if it cannot grade these rows. The first is tried, with its answer as the response."""
        if self._kind.startswith("code"):
            check_tests(rows)
        elif self._kind != "math":
            self.is_silent = True  # what it raises is in the refusal
            first = rows[0]
            case = Case(first.answer, first.answer, first.problem, first.extra, first.reward)
            if grade(case).reason in FAILED:
                self.refuse("failed when it was tried with the first row, its answer as the response", BadInput)
            self.is_silent = False

    def refuse(self, what: str, kind: type[BadInput | TryAgain]) -> None:
        """Raise if a user's function or the judge has failed: what it did (`what`), and its first failure."""
        if self.first_failure is None:
            return
        message, config = f"{self._name}: {what} ({_described(self.first_failure)}): ", self._config
        if self._kind == "judge":
            raise kind(
                f"{message}check that the server runs and serves reward.judge.model, and what reward.judge.prompt asks"
            )
        raise BadInput(
            f"{message}expected f(problem, answer, response, extra) -> float | bool within reward.response_timeout_s="
            f"{config.response_timeout_s:g} and reward.memory_mib={config.memory_mib}, fix it"
        )


def _described(grade: Grade) -> str:
    return grade.detail if grade.reason == "error" else f"{grade.reason} {grade.detail}".strip()


class VerifierPool:
    """Grades batches of responses, those of several threads at once, each by the verifier of its row.

    Answers that are equal as strings or plain numbers are settled in the caller's thread; the rest goes to worker
    processes (rewards.workers) or the judge. They start when they are first needed; a user's function is imported at
    once, so that a wrong path is known before a run starts.

    Raises BadInput if the function cannot be imported, or if workers cannot start within the limits of the config.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config, self._closed, self._lock = config, False, threading.Lock()
        self._verifiers = {config: _Verifier(config)}

    @property
    def workers(self) -> Any:
        """The processes, or the judge, of section reward."""
        return self._verifiers[self._config].workers

    def grade_batch(self, cases: Sequence[Case | tuple[str, str]], on_done: OnDone | None = None) -> list[Grade]:
        """The grades on cases, each a Case or (ground_truth, response), in their order.

        on_done(index, grade) is called in this thread as each grade comes.
        """
        grades: dict[int, Grade] = {}

        def done(index: int, verifier: _Verifier, grade: Grade) -> None:
            grades[index] = verifier.scored(grade)
            if on_done is not None:
                on_done(index, grades[index])

        alike: dict[tuple[object, ...], list[int]] = {}
        places: dict[Future[Grade], tuple[_Verifier, list[int]]] = {}
        try:
            for index, texts in enumerate(cases):
                case = texts if isinstance(texts, Case) else Case(*texts)
                verifier = self._verifier(case.reward)
                prepared = verifier.prepare(case)
                if isinstance(prepared, Grade):
                    done(index, verifier, prepared)
                elif (key := verifier.key(index, prepared)) in alike:
                    alike[key].append(index)
                else:
                    alike[key] = [index]
                    places[verifier.workers.submit(prepared)] = verifier, alike[key]
            for future in as_completed(places):
                verifier, indices = places[future]
                for index in indices:
                    done(index, verifier, future.result())
        except CancelledError:
            raise RuntimeError("the verifier pool is closed") from None
        finally:
            for future in places:  # of a batch that was interrupted nobody waits for the rest
                future.cancel()
        return [grades[index] for index in range(len(cases))]

    def check(self, prompts: "Iterable[Prompt]") -> list[str]:
        """Try each verifier that rows ask for with the first such row; returns their names and numbers of rows.

        Raises:
            BadInput: a row asks for a verifier that does not exist, or its answer holds no tests; a user's function or
                the judge fails: wrong arguments, a result that is no number, an exception, or too much time.
        """
        rows: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            rows.setdefault(prompt.reward, []).append(prompt)
        for reward, prompts in rows.items():
            try:
                verifier = self._verifier(reward)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise BadInput(f"{prompts[0].source}: row {prompts[0].id}: reward: {message}") from None
            verifier.check(prompts, lambda case: self.grade_batch([case])[0])
        configs = {reward: self._config.changed(reward) for reward in rows}
        return [
            f"{config.function or config.verifier} for {len(rows[reward])} rows" for reward, config in configs.items()
        ]

    def refuse(self, what: str) -> None:
        """Raise for a user's function (BadInput) or a judge (TryAgain) that did `what`: it has failed."""
        with self._lock:
            verifiers = list(self._verifiers.values())
        for verifier in verifiers:
            verifier.refuse(what, TryAgain)

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards; closing twice does nothing."""
        with self._lock:
            verifiers = [] if self._closed else list(self._verifiers.values())
            self._closed = True
        for verifier in verifiers:
            verifier.workers.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verifier(self, reward: str) -> _Verifier:
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            config = self._config.changed(reward)
            if config not in self._verifiers:
                self._verifiers[config] = _Verifier(config)
            return self._verifiers[config]
