"""Grades on samples: what a truncated response counts for, and who is asked about it."""

from dataclasses import replace

import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.experience.sample import FinishReason, Prompt, Sample
from vapo_megatron.rewards.grading import TRUNCATED, grade_samples
from vapo_megatron.rewards.pool import VerifierPool


def sample(finish: FinishReason) -> Sample:
    return Sample(Prompt("1", "p", "a", (1,)), 0, 0, 0, [5, 6], [0.0, 0.0], finish, 0, 0)


def test_a_function_is_given_the_fields_of_its_row() -> None:
    config = RewardConfig(verifier="function", function="reward_functions:obey", workers=1)
    of_two = [replace(sample("stop"), prompt=Prompt("1", "p", "a", (1,), extra={"score": s})) for s in (0.25, 2)]
    with VerifierPool(config) as verifier:
        verifier.try_out("p", "a", {"score": 1})
        grade_samples(of_two, verifier, lambda ids: "text", config)
    assert [s.reward for s in of_two] == [0.25, 2]


@pytest.mark.parametrize(("asked", "reward"), [(False, -1.0), (True, 0.25)])
def test_a_function_sees_truncated_responses_where_it_asks_to(asked: bool, reward: float) -> None:
    config = RewardConfig(
        verifier="function", function="reward_functions:half_for_what_was_cut", workers=1, grade_truncated=asked
    )
    samples = [sample("stop"), sample("length")]
    with VerifierPool(config) as verifier:
        grade_samples(samples, verifier, lambda ids: "text", config)
    assert [s.reward for s in samples] == [1.0, reward]
    assert [s.correct for s in samples] == [True, False]
    assert (samples[1].grade_reason == TRUNCATED) is not asked
