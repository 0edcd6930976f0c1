"""Which number of a batch a phase reads, where another would fit: rewards before or after shaping, whole lengths."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import make_batch, spread

from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.rollouts import has_signal
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.updates import correct_for_rollout, minibatches
from vapo_megatron.training.value_pretraining import split_prompts

LONG = [(2, 10), (3, 20), (4, 30), (2, 24)]
OVERLONG = {"shaping": {"soft_overlong": {"max_length": 30, "cache_length": 20}}}
SHAPED = torch.tensor([0.0, 0.5, -1.0, 0.3])  # rewards 0, 1, 0, 1 less 0, 0.5, 1 and 0.7


def step(settings: dict[str, Any], window_starts: list[int] | None = None) -> tuple[AlgorithmConfig, ShardedBatch]:
    batch, generator = make_batch(LONG, spread=3.0), torch.Generator().manual_seed(1)
    batch.old_logprobs = batch.rollout_logprobs + 0.3 * torch.randn(batch.response_tokens, generator=generator)
    batch.entropies = torch.zeros(batch.response_tokens)
    batch.group_ids = batch.group_ids // 2
    if window_starts is not None:
        batch.window_starts = torch.tensor(window_starts)
    config = AlgorithmConfig.model_validate(settings)
    if config.uses_critic:
        batch.values = torch.rand(batch.response_tokens, generator=generator)
    whole = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder)
        correct_for_rollout(whole, config.importance_sampling, recorder)
    return config, whole


def test_reinforce_pp_learns_from_shaped_rewards() -> None:
    _, batch = step(OVERLONG | {"advantage": {"estimator": "reinforce_pp"}})
    assert torch.allclose(batch.own.advantages, to_tokens(SHAPED, batch.own.response_cu_seqlens))  # type: ignore[arg-type]


def test_lambda_adapts_to_the_whole_response_and_not_to_its_window() -> None:
    config, batch = step({"advantage": {"length_adaptive_alpha": 0.3}}, window_starts=[5, 10, 20, 12])
    own, bounds = batch.own, batch.own.response_cu_seqlens
    rewards = place_terminal(own.rewards, bounds, own.response_tokens)
    assert own.values is not None and own.advantages is not None
    lam = length_adaptive_lambda(torch.tensor([10, 20, 30, 24]), 0.3)
    expected, _ = decoupled_gae(rewards, own.values, bounds, lam, config.advantage.lambda_critic)  # type: ignore[arg-type]
    assert torch.allclose(own.advantages, expected, atol=1e-6)


def test_an_eighth_of_the_prompts_is_held_out_with_all_their_responses() -> None:
    prompts, groups = torch.arange(80).repeat_interleave(4), torch.arange(160).repeat_interleave(2)
    train, held_out = split_prompts(prompts, groups, most_groups=1000, seed=3)
    assert len(held_out) == 40 and sorted(train + held_out) == list(range(320))
    assert not {int(prompts[s]) for s in train} & {int(prompts[s]) for s in held_out}


def test_each_step_has_an_order_of_its_own() -> None:
    config, batch = step({"update": {"minibatch_size": 1}})
    orders = {
        str(list(minibatches(batch, config.update, 1, seed, salt)))
        for seed in ("7/1", "7/2", "7/3", "8/1")
        for salt in (1, 2)
    }
    assert len(orders) > 4, "24 orders: of seed, step and model"


def test_signal_is_that_of_grades_and_not_of_scores() -> None:
    prompt = Prompt("0", "", "", (1,))
    one = Sample(prompt, 0, 0, 0, [3], [-1.0], "stop", 0, 0, reward=0.2, correct=False)  # type: ignore[arg-type]
    assert not has_signal([one, replace(one, reward=0.4)])
    assert has_signal([one, replace(one, correct=True)])


def test_what_an_agent_gave_is_a_signal_where_it_differs() -> None:
    prompt = Prompt("0", "", "", (1,))
    one = Sample(prompt, 0, 0, 0, [3, 4, 5, 2], [-1.0] * 4, "stop", 0, 0, reward=0.3, correct=False)  # type: ignore[arg-type]
    by_agent = replace(one, grade_reason="agent")
    assert has_signal([by_agent, replace(by_agent, reward=0.4)]), "both are wrong, one of them less"
    assert not has_signal([by_agent, replace(by_agent, correct=True)]), "there is nothing to compare"
    orders = [np.array(order, dtype=np.float32) for order in permutations([0.1, 0.1, 0.6, 0.3])]
    by_turn = [replace(one, turn_rewards=order, reward=float(order.sum()) - 1) for order in orders]
    assert len({sample.reward for sample in by_turn}) > 1 and not has_signal(by_turn), (
        "the same sum, but for its rounding"
    )
    assert has_signal([*by_turn, replace(one, reward=-1.0)]), "verdicts are the same, one earned nothing on the way"
    cut = replace(by_agent, finish_reason="length", grade_reason="truncated", reward=-1.0)
    assert has_signal([by_agent, cut]) and not has_signal([cut, cut])
