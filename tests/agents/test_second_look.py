"""The example of two turns: the policy is asked to check its answer."""

import pytest
from stub_episodes import WRITTEN, Engine, play

from vapo_megatron.agents.episodes import episode_metrics
from vapo_megatron.data.tokenizer import TextTokenizer

pytestmark = pytest.mark.usefixtures("fresh")


def test_the_second_answer_follows_the_first(tokenizer: TextTokenizer) -> None:
    samples = play(tokenizer, "examples.agents.second_look:run", samples=2)
    assert Engine.calls == 4 and episode_metrics(samples)["agent/turns"] == 2.0
    for sample in samples:
        assert sample.reward is None and sample.grade_reason == "", "left to the verifier"
        assert sample.loss_mask is not None and sample.loss_mask.sum() == 2 * WRITTEN
