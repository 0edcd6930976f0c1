"""Value pretraining learns Monte-Carlo returns of recorded responses and is judged on others."""

from collections import Counter

import pytest
import torch

from vapo_megatron.algorithms.gae import decoupled_gae, monte_carlo_returns
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.config.value import ValueLossConfig, ValuePretrainingConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.training.value_pretraining import (
    for_pretraining,
    good_enough,
    largest_bias,
    replay_order,
    split_prompts,
)


def record(groups: int = 16, size: int = 4) -> ExperienceBatch:
    samples = []
    for group in range(groups):
        for index in range(size):
            length = 1 + (group * size + index) % 7
            reward = float((group + index) % 2)
            prompt = Prompt(str(group), "", "", (1, 2))
            samples.append(
                Sample(
                    prompt,
                    group,
                    index,
                    0,
                    [3] * length,
                    [0.0] * length,
                    "stop",
                    0,
                    0,
                    reward=reward,
                )
            )
    return from_samples(samples)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_targets_are_gae_with_lambda_1_whatever_other_samples(
    gamma: float,
) -> None:
    batch = record()
    rewards = place_terminal(batch.rewards, batch.response_cu_seqlens, batch.response_tokens)
    zeros = torch.zeros(batch.response_tokens)
    _, expected = decoupled_gae(rewards, zeros, batch.response_cu_seqlens, 1.0, 1.0, gamma)
    found = monte_carlo_returns(batch.rewards, batch.response_cu_seqlens, gamma, None)
    torch.testing.assert_close(found, expected, rtol=1e-6 if gamma < 1 else 0, atol=0)
    assert found.dtype == torch.float32
    batch.returns = found
    part = batch.select([9, 3, 40])
    alone = monte_carlo_returns(part.rewards, part.response_cu_seqlens, gamma, None)
    assert part.returns is not None and torch.equal(alone, part.returns)


def test_no_prompt_is_both_trained_and_held_out_in_any_rollout() -> None:
    """Cut by draw, as it was, nearly every prompt of a small data set is on both sides."""
    draws = 80
    # 16 prompts, each drawn five times
    prompt_ids = (torch.arange(draws) * 7 % 16).repeat_interleave(4)
    group_ids = torch.arange(draws).repeat_interleave(4)
    train, held_out = split_prompts(prompt_ids, group_ids, most_groups=100, seed=1)
    assert sorted(train + held_out) == list(range(4 * draws))
    assert set(prompt_ids[train].tolist()).isdisjoint(prompt_ids[held_out].tolist())
    assert len(held_out) == 4 * draws // 8
    assert len(split_prompts(prompt_ids, group_ids, most_groups=5, seed=1)[1]) == 20, "one prompt"
    assert split_prompts(prompt_ids, group_ids, 100, seed=1) == (train, held_out)
    assert split_prompts(prompt_ids, group_ids, 100, seed=2) != (train, held_out)


def test_as_many_groups_are_held_out_as_are_asked_for_at_most() -> None:
    prompts = torch.arange(24).repeat(2)  # an eighth of them are three, of two groups each
    groups = torch.arange(48)
    held = [len(split_prompts(prompts, groups, most, seed=1)[1]) for most in (1, 2, 3, 4, 5, 6, 7)]
    assert held == [2, 2, 2, 4, 4, 6, 6], "one prompt at least"


def test_the_only_prompt_is_trained_and_measured_on() -> None:
    everything = list(range(6))
    assert split_prompts(torch.zeros(6, dtype=torch.int64), torch.arange(6), 4, seed=1) == (
        everything,
        everything,
    )


def test_every_epoch_replays_every_sample_once_in_a_new_order() -> None:
    config = ValuePretrainingConfig(replay_epochs=3, minibatch_size=10)
    steps = replay_order(list(range(25)), config, seed=1)
    assert [len(step) for step in steps] == [10, 10, 5] * 3
    assert Counter(s for step in steps for s in step) == dict.fromkeys(range(25), 3)
    assert steps[:3] != steps[3:6]
    assert len(replay_order(list(range(25)), config.model_copy(update={"steps": 4}), seed=1)) == 4


@pytest.mark.parametrize(
    "stop,explained,bias,expected",
    [
        ({}, 0.99, 0.0, False),  # nothing is set: the replay goes to its end
        ({"stop_explained_variance": 0.3}, 0.31, 0.5, True),
        ({"stop_explained_variance": 0.3, "stop_bias": 0.1}, 0.31, 0.5, False),
        ({"stop_explained_variance": 0.3, "stop_bias": 0.1}, 0.31, -0.09, True),
        ({"stop_bias": 0.1}, -1.0, -0.2, False),
        ({"stop_explained_variance": 0.3, "stop_bias": 0.1}, 0.3, 0.1, True),
    ],
)
def test_it_stops_where_every_stop_that_is_set_is_reached(
    stop: dict[str, float], explained: float, bias: float, expected: bool
) -> None:
    metrics = {names.EXPLAINED_VARIANCE: explained} | {
        f"{names.VALUE_BIAS}{p}": 0.0 for p in names.BIAS_POSITIONS
    }
    metrics[f"{names.VALUE_BIAS}{names.BIAS_POSITIONS[-1]}"] = bias
    assert largest_bias(metrics) == abs(bias)
    assert good_enough(metrics, ValuePretrainingConfig(**stop)) is expected


def test_values_are_not_held_near_old_ones_that_do_not_exist_yet() -> None:
    clipped = ValueLossConfig(kind="clipped")
    assert for_pretraining(clipped).kind == "mse"
    assert clipped.kind == "clipped", "training itself clips"
    for other in (ValueLossConfig(), ValueLossConfig(kind="hl_gauss")):
        assert for_pretraining(other) == other
