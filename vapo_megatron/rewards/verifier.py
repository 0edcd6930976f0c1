"""The interface of a kind of reward. config/verifiers.py finds its class by name; rewards.pool
schedules it.

prepare, score and check run in the trainer; load and grade in a worker process, which has no torch
and little memory.
"""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from vapo_megatron.config.verifiers import VERIFIERS
from vapo_megatron.errors import BadInput, VapoError
from vapo_megatron.rewards.grade import FAILED, Case, Grade

if TYPE_CHECKING:  # a worker has no use for pydantic and torch
    from vapo_megatron.config.reward import RewardConfig
    from vapo_megatron.data.sample import Prompt

Message = dict[str, Any]


class Backend(Protocol):
    """Grades messages one by one, many at a time: worker processes, or the client of a server."""

    def submit(self, message: Message) -> "Future[Grade]":
        """A future of the grade on a message."""

    def close(self) -> None:
        """End the processes that were started."""


class Verifier:
    """A kind of reward.

    Attributes:
        limits_cpu_time: reward.response_timeout_s is processor time of the worker, not wall time.
        grace_s: seconds that a worker has beyond that to say itself that a response took too long.
        blames_user: a verification that fails is the fault of a user's function or server. The
            first is printed.
        failure: raised where all verifications of a step fail.
    """

    limits_cpu_time: ClassVar[bool] = False
    grace_s: ClassVar[float] = 0.0
    blames_user: ClassVar[bool] = False
    failure: ClassVar[type[VapoError]] = BadInput

    def __init__(self, config: "RewardConfig") -> None:
        """config: the section reward, or in a worker an object with its values."""
        self.config = config

    @property
    def name(self) -> str:
        """The setting that asks for it, for messages."""
        return f"reward.verifier={self.config.verifier}"

    @property
    def remedy(self) -> str:
        """What to do where it fails, for messages."""
        return "fix it"

    def backend(self) -> Backend:
        """What grades its messages: processes that call grade()."""
        from vapo_megatron.rewards.workers import Workers

        return Workers(self.config)

    def prepare(self, case: Case) -> Grade | Message:
        """The grade if that is plain, else the message, which goes into JSON, that grade() gets."""
        return {"ground_truth": case.ground_truth, "response": case.response}

    def shares_grades(self) -> bool:
        """Whether equal messages of a batch are graded once."""
        return True

    def load(self) -> None:
        """In a worker, before its first deadline: slow imports. What it raises refuses the
        config."""

    def grade(self, message: Message) -> dict[str, Any]:
        """In a worker: the fields of a Grade. What it raises becomes a grade with the reason
        error."""
        raise NotImplementedError

    def score(self, grade: Grade) -> Grade:
        """The grade with its reward."""
        correct = self.config.correct
        incorrect = self.config.incorrect
        if grade.reason != "scored":
            return replace(grade, score=correct if grade.correct else incorrect)
        if VERIFIERS[self.config.verifier].grades == "score":
            return grade
        return replace(grade, score=incorrect + (correct - incorrect) * grade.score)

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Raise BadInput if it cannot grade these rows."""

    def check_first(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> Grade:
        """The grade on the first row with its answer as the response. Raise BadInput if it
        fails."""
        first = rows[0]
        case = Case(first.answer, first.answer, first.problem, first.extra, first.reward)
        result = grade(case)
        if result.reason in FAILED:
            raise BadInput(
                f"{self.name}: failed when it was tried with the first row, its answer as the "
                f"response ({result.failure}): {self.remedy}"
            )
        return result


def verifier_of(config: "RewardConfig") -> Verifier:
    """The verifier that a section reward names."""
    module, _, name = VERIFIERS[config.verifier].path.partition(":")
    kind: type[Verifier] = getattr(importlib.import_module(module), name)
    return kind(config)
