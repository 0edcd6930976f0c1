"""Verifies responses in separate processes, which an answer may hang, crash or bloat without harm
to the trainer."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.grade import FAILED, Case, Grade
from vapo_megatron.rewards.verifier import Message, verifier_of

if TYPE_CHECKING:  # tools that grade have no use for torch
    from vapo_megatron.data.sample import Prompt

__all__ = ["Case", "VerifierPool"]

OnDone = Callable[[int, Grade], None]


class _Scheduled:
    """A verifier and what grades its messages; remembers its first failure."""

    def __init__(self, config: RewardConfig) -> None:
        self.verifier = verifier_of(config)
        self.workers: Any = self.verifier.backend()
        self.first_failure: Grade | None = None
        self.is_silent = False

    def key(self, index: int, message: Message) -> tuple[object, ...]:
        """The same for all cases of a batch that share a grade."""
        shared = self.verifier.shares_grades()
        return (id(self), *message.values()) if shared else (id(self), index)

    def scored(self, grade: Grade) -> Grade:
        """The grade with its reward. The first failure of a user's function or judge is printed."""
        if grade.reason in FAILED and self.verifier.blames_user:
            self.first_failure = self.first_failure or grade
            if not self.is_silent:
                self.is_silent = True
                print(
                    f"vapo-megatron: {self.verifier.name} failed on a response ({grade.failure}); "
                    "it counts as incorrect, and into reward/failed as further ones do",
                    file=sys.stderr,
                )
        return self.verifier.score(grade)

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Raise BadInput if it cannot grade these rows."""
        self.is_silent = True  # its exception is in the refusal
        self.verifier.check(rows, grade)
        self.is_silent = False

    def refuse(self, deed: str) -> None:
        """Raise where a user's function (BadInput) or the judge (TryAgain) did `deed`: it has
        failed."""
        if self.first_failure is None:
            return
        message = (
            f"{self.verifier.name}: {deed} ({self.first_failure.failure}): {self.verifier.remedy}"
        )
        raise self.verifier.failure(message)


class VerifierPool:
    """Grades batches of responses, from several threads at once, each by the verifier of its
    row.

    Answers that are equal as strings or plain numbers are settled in the caller's thread; the rest
    goes to worker processes (rewards.workers) or the judge. They start when they are first needed;
    a user's function is imported at once, so that a wrong path is known before a run starts.

    Raises BadInput if the function cannot be imported, or if workers cannot start within the limits
    of the config.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._closed = False
        self._lock = threading.Lock()
        self._verifiers = {config: _Scheduled(config)}

    @property
    def workers(self) -> Any:
        """The processes, or the judge, of section reward."""
        return self._verifiers[self._config].workers

    def grade_batch(
        self, cases: Sequence[Case | tuple[str, str]], on_done: OnDone | None = None
    ) -> list[Grade]:
        """The grades on cases, each a Case or (ground_truth, response), in their order.

        on_done(index, grade) is called in this thread as each grade comes.
        """
        grades: dict[int, Grade] = {}

        def done(index: int, verifier: _Scheduled, grade: Grade) -> None:
            grades[index] = verifier.scored(grade)
            if on_done is not None:
                on_done(index, grades[index])

        alike: dict[tuple[object, ...], list[int]] = {}
        places: dict[Future[Grade], tuple[_Scheduled, list[int]]] = {}
        try:
            for index, texts in enumerate(cases):
                case = texts if isinstance(texts, Case) else Case(*texts)
                verifier = self._verifier(case.reward)
                prepared = verifier.verifier.prepare(case)
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
        """Try each verifier that rows ask for with the first such row; returns their names and
        numbers of rows.

        Raises:
            BadInput: a row asks for a verifier that does not exist, or its answer holds no tests; a
                user's function or the judge fails: wrong arguments, a result that is no number, an
                exception, or too much time.
        """
        rows: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            rows.setdefault(prompt.reward, []).append(prompt)
        for reward, prompts in rows.items():
            try:
                verifier = self._verifier(reward)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise BadInput(
                    f"{prompts[0].source}: row {prompts[0].id}: reward: {message}"
                ) from None
            verifier.check(prompts, lambda case: self.grade_batch([case])[0])
        configs = {reward: self._config.changed(reward) for reward in rows}
        return [
            f"{config.function or config.verifier} for {len(rows[reward])} rows"
            for reward, config in configs.items()
        ]

    def refuse(self, what: str) -> None:
        """Raise for a user's function (BadInput) or a judge (TryAgain) that did `what`: it has
        failed."""
        with self._lock:
            verifiers = list(self._verifiers.values())
        for verifier in verifiers:
            verifier.refuse(what)

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

    def _verifier(self, reward: str) -> _Scheduled:
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            config = self._config.changed(reward)
            if config not in self._verifiers:
                self._verifiers[config] = _Scheduled(config)
            return self._verifiers[config]
