"""The verifier of exact answers."""

from collections.abc import Iterator

import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.rewards.pool import VerifierPool


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(RewardConfig(verifier="exact", workers=1, incorrect=-1.0)) as verifiers:
        yield verifiers


@pytest.mark.parametrize(
    ("ground_truth", "response", "reason", "score"),
    [
        ("Paris", "Answer: Rome? No.\nANSWER: Paris \n", "equal", 1.0),
        (" two words ", "answer:two words", "equal", 1.0),
        ("Paris", "answer: Paris\nanswer: Rome", "different", -1.0),
        ("Paris", "answer: Paris.", "different", -1.0),
        ("Paris", "answer: paris", "different", -1.0),
        ("Paris", "answer:", "different", -1.0),
        ("Paris", "Paris", "no_answer", -1.0),
        (" ", "answer: ", "no_ground_truth", -1.0),
    ],
)
def test_the_text_behind_the_last_marker_is_compared(
    pool: VerifierPool, ground_truth: str, response: str, reason: str, score: float
) -> None:
    (grade,) = pool.grade_batch([(ground_truth, response)])
    assert (grade.reason, grade.correct, grade.score) == (reason, score > 0, score)
