"""What other trainers call differently leads to keys that exist, whatever is renamed here."""

import re

import pytest

from vapo_megatron.config.base import known_keys
from vapo_megatron.config.explain import OTHER_TRAINERS, named_here
from vapo_megatron.config.train import TrainConfig


def test_every_name_for_a_foreign_key_is_one_of_ours() -> None:
    known = known_keys(TrainConfig)
    texts = [text for keys in OTHER_TRAINERS.values() for text in keys.values()]
    named = [name for text in texts for name in re.split(", or |, | and ", text.partition(" (")[0])]
    assert [name for name in named if name not in known] == []


def test_no_key_of_ours_is_taken_for_another_trainers() -> None:
    assert [key for key in known_keys(TrainConfig) if named_here(key) is not None] == []


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("actor_rollout_ref.rollout.n", "here it is batch.samples_per_prompt"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "here it is data.eval.samples"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "minibatch_size (responses; prompts with minibatch_unit=groups)",
        ),
        ("trainer.critic_warmup", "here it is value_pretraining.iterations"),
        ("actor_rollout_ref.rollout.temperature", "here it is sampling.temperature"),
        ("n_samples_per_prompt", "here it is batch.samples_per_prompt"),
        ("policy.generation.max_new_tokens", "here it is sampling.max_new_tokens"),
    ],
)
def test_foreign_key_with_another_unit_is_not_copied_unchanged(theirs: str, told: str) -> None:
    """verl's 32 prompts a mini-batch, given as 32 responses, are sixteen times as many updates of a
    rollout."""
    assert told in str(named_here(theirs))
