"""Which number of a batch a phase reads, where another would fit: rewards before or after shaping, whole lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch, spread

from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.microbatch import Share
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.rollouts import has_signal
from vapo_megatron.training.score import score
from vapo_megatron.training.shards import Part, ShardedBatch
from vapo_megatron.training.updates import correct_for_rollout, minibatches, policy_loss
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


def test_residual_baselines_are_of_shaped_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AlgorithmConfig.model_validate(OVERLONG | {"value_loss": {"residual": True}})
    whole = make_batch(LONG)
    whole.group_ids = whole.group_ids // 2
    batch, zeros = spread(whole), torch.zeros(whole.response_tokens, 2)
    monkeypatch.setattr("vapo_megatron.training.score.of_all", lambda *given: zeros)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        models: Any = type(
            "M", (), {"reference": None, "has_base_as_reference": False, "actor": None, "critic": object()}
        )()
        score(models, batch, config, recorder)
    assert batch.own.baselines is not None
    assert batch.own.baselines.tolist() == pytest.approx([0.5, 0.0, 0.3, -1.0])
    assert torch.equal(batch.own.values, to_tokens(batch.own.baselines, batch.own.response_cu_seqlens))  # type: ignore[arg-type]


def test_lambda_adapts_to_the_whole_response_and_not_to_its_window() -> None:
    config, batch = step({"advantage": {"length_adaptive_alpha": 0.3}}, window_starts=[5, 10, 20, 12])
    own, bounds = batch.own, batch.own.response_cu_seqlens
    rewards = place_terminal(own.rewards, bounds, own.response_tokens)
    assert own.values is not None and own.advantages is not None
    lam = length_adaptive_lambda(torch.tensor([10, 20, 30, 24]), 0.3)
    expected, _ = decoupled_gae(rewards, own.values, bounds, lam, config.advantage.lambda_critic)  # type: ignore[arg-type]
    assert torch.allclose(own.advantages, expected, atol=1e-6)


def test_dropped_tokens_are_not_counted_in_the_mean_of_their_response() -> None:
    corrected = {"kind": "mis", "rejected": "dropped", "low": 0.8, "high": 1.2}
    config, batch = step({"importance_sampling": corrected, "policy_loss": {"aggregation": "sequence_mean"}})
    loss = policy_loss(Part(batch.own, Share([[0, 1, 2, 3]], 4), batch.table, torch.arange(4), []), config)
    kept = batch.own.importance_weights != 0
    assert 0 < int(kept.sum()) < len(kept)
    weights = torch.where(kept, loss.weights * loss.importance / batch.own.importance_weights, 0)  # type: ignore[operator]
    for part in weights.split(batch.own.response_lengths.tolist()):
        assert float(part.sum()) == pytest.approx(1 / 4), "each response counts alike, by the tokens that are left"


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
