"""The kinds of reward by name. Importing this imports none of them."""

from dataclasses import dataclass
from typing import Literal

# The largest float32: rewards are trained in that precision, where more is infinite.
LARGEST_REWARD = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class VerifierKind:
    """A kind of reward.

    Attributes:
        path: package.module:Class, a rewards.verifier.Verifier.
        grades: verdict: correct or not; share: of the way from reward.incorrect to reward.correct;
            score: the reward itself.
        summary: how it grades, for docs/configuration.md.
    """

    path: str
    grades: Literal["verdict", "share", "score"]
    summary: str


VERIFIERS = {
    "math": VerifierKind("vapo_megatron.rewards.math:MathVerifier", "verdict", "built-in"),
    "code": VerifierKind(
        "vapo_megatron.rewards.code:CodeVerifier",
        "verdict",
        "Python that must pass all tests in a row's answer",
    ),
    "code_share": VerifierKind(
        "vapo_megatron.rewards.code:CodeVerifier",
        "share",
        "the share of these tests that it passes",
    ),
    "judge": VerifierKind("vapo_megatron.rewards.judge:JudgeVerifier", "share", "a model"),
    "function": VerifierKind("vapo_megatron.rewards.function:FunctionVerifier", "score", "yours"),
}
