"""What is graded, and the grade."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# equal, different: the answers were compared. unevaluated: the right value, with an operation left
# to carry out. copied: an expression of the problem. no_answer: none found in the answer format.
# no_ground_truth: there is none. too_complex: refused unread. timeout, memory, crashed: what became
# of the worker. error: a function raised. scored: by a share or a score.
Reason = Literal[
    "equal",
    "different",
    "unevaluated",
    "copied",
    "no_answer",
    "no_ground_truth",
    "too_complex",
    "timeout",
    "memory",
    "crashed",
    "error",
    "scored",
]

# Reasons of a grade that says nothing of the response.
FAILED: frozenset[Reason] = frozenset({"timeout", "memory", "crashed", "error"})


@dataclass(frozen=True, slots=True)
class Case:
    """A response to verify. extra is for a user's function and must go into JSON; reward is
    Prompt.reward."""

    ground_truth: str
    response: str
    problem: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    reward: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """A verifier's grade of one response.

    extracted is the answer that was compared, detail explains reasons such as error, score is the
    reward (1 or 0 unless a pool was configured otherwise).
    """

    correct: bool
    reason: Reason
    extracted: str = ""
    score: float = 0.0
    detail: str = ""

    @property
    def failure(self) -> str:
        """What a failed verification says of itself."""
        return self.detail if self.reason == "error" else f"{self.reason} {self.detail}".strip()
