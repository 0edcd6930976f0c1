"""Which number of a batch a phase reads, where another would fit: rewards before or after shaping,
whole lengths."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import make_batch, spread
from torch import Tensor

from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.checkpoint.recorded_rollouts import RecordedRollouts, write_rollout
from vapo_megatron.config.algorithm import AlgorithmConfig, ShapingConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.value import ValuePretrainingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.rollouts import has_signal
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.token_rewards import teaches_critic
from vapo_megatron.training.updates import correct_for_rollout, minibatches
from vapo_megatron.training.value_pretraining import Targets, split_prompts

LONG = [(2, 10), (3, 20), (4, 30), (2, 24)]
OVERLONG = {"shaping": {"soft_overlong": {"max_length": 30, "cache_length": 20}}}
SHAPED = torch.tensor([0.0, 0.5, -1.0, 0.3])  # rewards 0, 1, 0, 1 less 0, 0.5, 1 and 0.7


def step(
    settings: dict[str, Any],
    window_starts: list[int] | None = None,
    values: Tensor | None = None,
    history: ReturnHistory | None = None,
    row: dict[str, float] | None = None,
) -> tuple[AlgorithmConfig, ShardedBatch]:
    """A scored step with its estimates; its metrics are added to row."""
    batch = make_batch(LONG, spread=3.0)
    generator = torch.Generator().manual_seed(1)
    batch.old_logprobs = batch.rollout_logprobs + 0.3 * torch.randn(
        batch.response_tokens, generator=generator
    )
    batch.entropies = torch.zeros(batch.response_tokens)
    batch.group_ids = batch.group_ids // 2
    if window_starts is not None:
        batch.window_starts = torch.tensor(window_starts)
    config = AlgorithmConfig.model_validate(settings)
    if config.uses_critic:
        batch.values = torch.rand(batch.response_tokens, generator=generator)
        batch.values = batch.values if values is None else values
    if config.uses_reference:
        batch.ref_logprobs = batch.rollout_logprobs
    whole = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder, history=history)
        correct_for_rollout(whole, config.importance_sampling, recorder)
        (row if row is not None else {}).update(recorder.write(1))
    return config, whole


def test_reinforce_pp_learns_from_shaped_rewards() -> None:
    _, batch = step(OVERLONG | {"advantage": {"estimator": "reinforce_pp"}})
    assert torch.allclose(
        batch.local.advantages, to_tokens(SHAPED, batch.local.response_cu_seqlens)
    )  # type: ignore[arg-type]


def by_token(per_response: Tensor, batch: ShardedBatch) -> Tensor:
    return to_tokens(per_response, batch.local.response_cu_seqlens)


def test_calibration_compares_with_shaped_rewards() -> None:
    settings = OVERLONG | {"advantage": {"calibration": "trust"}}
    _, batch = step(settings, history=ReturnHistory())
    others = SHAPED[[1, 0, 3, 2]]  # nothing is known of the critic: the other one of the group
    torch.testing.assert_close(batch.local.advantages, by_token(SHAPED - others, batch))


def test_a_prompts_history_is_of_shaped_rewards() -> None:
    history = ReturnHistory()
    settings = {"advantage": {"estimator": "batch_baseline", "tracker": True}}
    _, batch = step(OVERLONG | settings, history=history)
    others = (SHAPED.sum() - SHAPED) / 3
    torch.testing.assert_close(batch.local.advantages, by_token(SHAPED - others, batch))
    assert batch.table.prompt_keys is not None
    sums = [history.tracked[str(key)][0] for key in batch.table.prompt_keys.tolist()]
    assert sums == pytest.approx(SHAPED.tolist())


def test_vtrace_weighs_by_trainer_over_engine() -> None:
    settings = {"advantage": {"off_policy": "vtrace", "lambda_policy": 0.0, "lambda_critic": 0.0}}
    _, batch = step(settings)
    local = batch.local
    old = local.old_logprobs
    values = local.values
    bounds = local.response_cu_seqlens
    assert old is not None and values is not None and local.returns is not None
    rewards = place_terminal(local.rewards, bounds, local.response_tokens)
    following = torch.cat((values[1:], torch.zeros(1)))
    following[bounds[1:] - 1] = 0.0
    weights = (old - local.rollout_logprobs).exp().clamp(max=1.0)
    targets = values + weights * (rewards + following - values)
    torch.testing.assert_close(local.returns, targets, rtol=1e-4, atol=1e-5)


def test_the_distance_to_a_teacher_is_not_whitened() -> None:
    kl = {"placement": "advantage", "coef": 0.5}
    _, plain = step({"advantage": {"whiten": "full"}})
    _, taught = step({"advantage": {"whiten": "full"}, "kl": kl})
    local = taught.local
    assert local.old_logprobs is not None and local.ref_logprobs is not None
    distance = 0.5 * (local.old_logprobs - local.ref_logprobs)
    torch.testing.assert_close(local.advantages, plain.local.advantages - distance)  # type: ignore[operator]


def test_a_critic_is_measured_on_returns_with_their_kl() -> None:
    settings = {"kl": {"placement": "reward", "coef": 0.5}, "advantage": {"lambda_policy": 1.0}}
    _, batch = step(settings)
    local = batch.local
    assert local.advantages is not None and local.values is not None
    row: dict[str, float] = {}
    step(settings, values=local.advantages + local.values, row=row)  # the returns themselves
    assert row[names.EXPLAINED_VARIANCE] == pytest.approx(1.0)


def test_a_window_teaches_the_critic_finished_responses() -> None:
    _, batch = step({})
    batch.fill(truncated=torch.tensor([True, False, True, False]))
    for truncated, expected in (("window", [False, True, False, True]), ("bootstrap", [True] * 4)):
        shaping = ShapingConfig.model_validate({"truncated": truncated})
        assert teaches_critic(batch.table, shaping).tolist() == expected
        assert teaches_critic(batch.local, shaping).tolist() == expected


def test_value_pretraining_learns_shaped_rewards(tmp_path: Path) -> None:
    batch = make_batch(LONG)
    record = RecordedRollouts(tmp_path)
    record.add(record.next_name, write_rollout(batch, tmp_path / record.next_name))
    targets = Targets(record, AlgorithmConfig.model_validate(OVERLONG)).select([3, 1])
    bounds = targets.local.response_cu_seqlens
    torch.testing.assert_close(targets.local.returns, to_tokens(SHAPED[[3, 1]], bounds))


def test_value_pretraining_draws_what_is_held_out_too() -> None:
    config = ValuePretrainingConfig(steps=2, minibatch_size=4)
    assert config.rollouts(samples=8) == 2, "seven of eight responses train: one rollout is too few"


def test_lambda_adapts_to_whole_response_and_not_to_its_window() -> None:
    config, batch = step(
        {"advantage": {"length_adaptive_alpha": 0.3}}, window_starts=[5, 10, 20, 12]
    )
    own = batch.local
    bounds = batch.local.response_cu_seqlens
    rewards = place_terminal(own.rewards, bounds, own.response_tokens)
    assert own.values is not None and own.advantages is not None
    lam = length_adaptive_lambda(torch.tensor([10, 20, 30, 24]), 0.3)
    expected, _ = decoupled_gae(rewards, own.values, bounds, lam, config.advantage.lambda_critic)  # type: ignore[arg-type]
    assert torch.allclose(own.advantages, expected, atol=1e-6)


def test_an_eighth_of_the_prompts_is_held_out_with_all_responses() -> None:
    prompts = torch.arange(80).repeat_interleave(4)
    groups = torch.arange(160).repeat_interleave(2)
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
    one = Sample(prompt, 0, 0, 0, [3], [-1.0], ("stop"), 0, 0, reward=0.2, correct=False)  # type: ignore[arg-type]
    assert not has_signal([one, replace(one, reward=0.4)])
    assert has_signal([one, replace(one, correct=True)])


def test_what_an_agent_gave_is_a_signal_where_it_differs() -> None:
    prompt = Prompt("0", "", "", (1,))
    one = Sample(
        prompt, 0, 0, 0, [3, 4, 5, 2], [-1.0] * 4, ("stop"), 0, 0, reward=0.3, correct=False
    )  # type: ignore[arg-type]
    by_agent = replace(one, grade_reason="agent")
    assert has_signal([by_agent, replace(by_agent, reward=0.4)]), "both are wrong, one of them less"
    assert not has_signal([by_agent, replace(by_agent, correct=True)]), (
        "there is nothing to compare"
    )
    orders = [np.array(order, dtype=np.float32) for order in permutations([0.1, 0.1, 0.6, 0.3])]
    by_turn = [replace(one, turn_rewards=order, reward=float(order.sum()) - 1) for order in orders]
    assert len({sample.reward for sample in by_turn}) > 1 and not has_signal(by_turn), (
        "the same sum, except for rounding"
    )
    assert has_signal([*by_turn, replace(one, reward=-1.0)]), (
        "verdicts are the same, one earned nothing on the way"
    )
    cut = replace(by_agent, finish_reason="length", grade_reason="truncated", reward=-1.0)
    assert has_signal([by_agent, cut]) and not has_signal([cut, cut])
