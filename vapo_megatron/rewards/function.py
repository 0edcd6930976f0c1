"""Rewards by a user's function."""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vapo_megatron.config.verifiers import LARGEST_REWARD
from vapo_megatron.rewards.grade import Case, Grade
from vapo_megatron.rewards.verifier import Backend, Message, Verifier

if TYPE_CHECKING:
    from vapo_megatron.data.sample import Prompt


class FunctionVerifier(Verifier):
    """Calls reward.function, f(problem, answer, response, extra) -> float | bool, in a worker."""

    blames_user = True

    @property
    def name(self) -> str:
        """The setting that names the function."""
        return f"reward.function={self.config.function}"

    @property
    def remedy(self) -> str:
        """What a function has to be."""
        return (
            "expected f(problem, answer, response, extra) -> float | bool within "
            f"reward.response_timeout_s={self.config.response_timeout_s:g} and "
            f"reward.memory_mib={self.config.memory_mib}, fix it"
        )

    def backend(self) -> Backend:
        """Processes, of which the first is started at once: a wrong path is known before a run
        starts."""
        from vapo_megatron.rewards.workers import Workers

        workers = Workers(self.config)
        try:
            workers.start()
        except BaseException:
            workers.close()
            raise
        return workers

    def prepare(self, case: Case) -> Message:
        """All that is known of the case."""
        return {
            "ground_truth": case.ground_truth,
            "response": case.response,
            "problem": case.problem,
            "extra": dict(case.extra),
        }

    def shares_grades(self) -> bool:
        """A function may answer differently each time."""
        return False

    def load(self) -> None:
        """Import the function."""
        module, _, name = str(self.config.function).partition(":")
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is not callable")
        self._function = function

    def grade(self, message: Message) -> dict[str, Any]:
        """The function's score; a share of it counts as correct above reward.correct_above."""
        result = self._function(
            message["problem"], message["ground_truth"], message["response"], message["extra"]
        )
        value = float(result)
        if not abs(value) <= LARGEST_REWARD:  # NaN is not
            raise ValueError(f"score {value:g} is not finite in float32")
        above = self.config.correct_above
        return {
            "correct": above is not None and value > above,
            "reason": "scored",
            "score": value,
        }

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Try it with the first row."""
        self.check_first(rows, grade)
