"""Value targets, whitening and baselines of a batch, as a step makes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread
from torch import Tensor

from vapo_megatron.algorithms import policy_loss, value_loss
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig
from vapo_megatron.config.policy import ImportanceSamplingConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch, from_samples
from vapo_megatron.data.microbatch import Share
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.token_loss import StepResult
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import baselines_of, gae, returns_known, token_rewards, whiten
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import importance_metrics, rollout_metrics, value_metrics
from vapo_megatron.training.shards import Part
from vapo_megatron.training.updates import check_targets, correct_for_rollout, update_metrics
from vapo_megatron.training.updates import policy_loss as loss_of


def batch_of(lengths: list[int], truncated: list[bool], rewards: list[float], size: int = 2) -> ExperienceBatch:
    samples = []
    for s, (length, cut, reward) in enumerate(zip(lengths, truncated, rewards, strict=True)):
        prompt, finish = Prompt(str(s // size), "", "", (1, 2)), "length" if cut else "stop"
        tokens, logprobs = [3] * length, [-1.0] * length
        samples.append(
            Sample(prompt, s // size, s % size, 0, tokens, logprobs, finish, 0, 0, reward=reward, correct=reward > 0)
        )
    return from_samples(samples)


def targets(batch: ExperienceBatch, values: Tensor, config: AlgorithmConfig) -> Tensor:
    batch.values, batch.shaped_rewards = values, batch.rewards
    gae(batch, token_rewards(batch, config), config, batch.response_lengths)
    assert batch.returns is not None
    return batch.returns


def bootstrapping(**advantage: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"shaping": {"truncated": "bootstrap"}, "advantage": advantage})


def test_values_of_truncated_responses_stay_where_they_are() -> None:
    """With the reward of a wrong answer beside the bootstrap each pass took 1 from them: after 40, V = -40."""
    config = bootstrapping(lambda_critic=1.0)
    batch = batch_of([6, 4], [True, False], [-1.0, 1.0])
    values = torch.zeros(10)
    for _ in range(40):
        values = targets(batch, values, config)
    assert values[:6].tolist() == [0.0] * 6, "nothing is known of how it would have ended"
    assert values[6:].tolist() == [1.0] * 4


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_a_bootstrapped_target_is_the_value_of_the_last_known_state(lam: float) -> None:
    batch = batch_of([3, 1], [True, True], [-1.0, -1.0])
    values = torch.tensor([0.1, 0.2, 0.5, -0.3])
    found = targets(batch, values, bootstrapping(lambda_critic=lam))
    assert found[2] == values[2] and found[3] == values[3]
    assert float(found[0]) == pytest.approx({0.0: 0.2, 0.9: 0.1 * 0.2 + 0.9 * 0.5, 1.0: 0.5}[lam], abs=1e-6)


def test_truncated_responses_without_a_return_are_not_measured_on() -> None:
    truncated = torch.tensor([True, False])
    assert returns_known(truncated, bootstrapping().shaping).tolist() == [False, True]
    assert returns_known(truncated, AlgorithmConfig().shaping).tolist() == [True, True]


def test_whitening_counts_the_tokens_that_carry_loss() -> None:
    advantages = torch.tensor([1.0, 3.0, 900.0, 900.0, 900.0, 5.0, 7.0, -900.0])
    batch = spread(batch_of([2, 3, 2, 1], [False] * 4, [1.0] * 4))
    batch.fill(selected=torch.tensor([True, False, True, False]))
    found = whiten(batch, advantages, AdvantageConfig(whiten="full"))
    kept = torch.tensor([1.0, 3.0, 5.0, 7.0])
    expected = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(found[[0, 1, 5, 6]], expected, atol=1e-6, rtol=1e-6)
    assert found[[2, 3, 4, 7]].tolist() == [0.0] * 4


def test_a_ratio_beyond_all_bounds_is_reported_as_a_number() -> None:
    assert policy_loss.bounded_ratio(torch.tensor([1000.0])).isfinite().all()
    batch = spread(batch_of([2], [False], [1.0]))
    found = importance_metrics(batch, torch.ones(2), torch.tensor([0.0, 500.0]))
    assert torch.tensor(list(found.values())).isfinite().all()


@pytest.mark.parametrize(("rejected", "tokens"), [("kept", 5), ("dropped", 3)])
def test_rejected_tokens_are_kept_in_the_denominator_or_dropped(rejected: str, tokens: int) -> None:
    batch = batch_of([2, 3], [False, False], [1.0, -1.0])
    batch.advantages, batch.selected = torch.ones(5), torch.ones(2, dtype=torch.bool)
    batch.old_logprobs, batch.rollout_logprobs = torch.tensor([1.0, 9.0, 1.1, 0.9, 9.0]).log(), torch.zeros(5)
    config = AlgorithmConfig.model_validate({"importance_sampling": {"kind": "mis", "rejected": rejected}})
    whole = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        correct_for_rollout(whole, config.importance_sampling, recorder)
    assert batch.importance_weights.tolist() == pytest.approx([1.0, 0.0, 1.1, 0.9, 0.0])
    part = Part(whole.own, Share([[0, 1]], 2), whole.table, torch.arange(2), [])
    loss = loss_of(part, config)
    weighted = loss.weights * loss.importance
    assert weighted.tolist() == pytest.approx([x / tokens for x in (1.0, 0.0, 1.1, 0.9, 0.0)])
    assert loss.weights.tolist() == pytest.approx([1 / 5] * 5), "of KL and entropy, which reject none"
    assert loss.mean_weights.tolist() == pytest.approx([1 / 5] * 5)


@pytest.mark.parametrize(
    ("reject", "expected"),
    [
        ("none", [1.1, 1.5, 0.6, 0.9, 0.9]),
        ("token", [1.1, 0.0, 0.6, 0.9, 0.9]),
        ("any_token", [0.0, 0.0, 0.6, 0.9, 0.9]),
        # The product of the first two is 2.75, that of the others 0.49; their geometric means 1.66 and 0.79.
        ("sequence", [0.0] * 5),
        ("geometric", [1.1, 1.5, 0.6, 0.9, 0.9]),
    ],
)
def test_truncated_weights_may_reject_tokens_or_responses(reject: str, expected: list[float]) -> None:
    batch = batch_of([2, 3], [False, False], [1.0, -1.0])
    batch.old_logprobs, batch.rollout_logprobs = torch.tensor([1.1, 2.5, 0.6, 0.9, 0.9]).log(), torch.zeros(5)
    config = ImportanceSamplingConfig.model_validate({"kind": "tis", "cap": 1.5, "reject": reject})
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        correct_for_rollout(spread(batch), config, recorder)
    assert batch.importance_weights is not None
    assert batch.importance_weights.tolist() == pytest.approx(expected)
    assert config.rejects == (reject != "none")


def test_targets_at_the_edge_are_learnt_as_they_are() -> None:
    """Bins from -1 to 1 without a margin learnt 1 as 0.973."""
    config = ValueLossConfig(kind="hl_gauss")
    edges = torch.tensor([-1.0, 1.0, 0.3])
    logits = torch.zeros(3, config.bins, requires_grad=True)
    loss = value_loss.hl_gauss(logits, edges, *config.support)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    learnt = (torch.full_like(logits, 1 / config.bins) - gradient).clamp(min=1e-12).log()
    torch.testing.assert_close(values_of(learnt, config), edges, atol=1e-3, rtol=0)


def test_bounded_values_stay_within_the_rewards() -> None:
    config = ValueLossConfig(squash="tanh", low=-1, high=3)
    found = values_of(torch.tensor([[-99.0], [0.0], [0.01], [99.0]]), config)
    assert found.tolist() == pytest.approx([-1, 1, 1.01, 3], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "reached", "beyond"),
    [
        ({"squash": "tanh"}, (-1.0, 1.0), ("1.01", "-1.01")),
        # Three bins of 2 / 45 beyond either end.
        ({"kind": "hl_gauss"}, (-1.13, 1.13), ("1.14", "-1.14")),
    ],
)
def test_a_target_that_no_value_reaches_is_refused(
    settings: dict[str, Any], reached: tuple[float, float], beyond: tuple[str, str]
) -> None:
    config = ValueLossConfig.model_validate(settings)
    check_targets(torch.tensor(reached), config)
    for target in beyond:
        with pytest.raises(BadInput, match=f"low..high=-1..1 does not hold the value target {target}:"):
            check_targets(torch.tensor([0.0, float(target)]), config)
    check_targets(torch.tensor([1.5]), ValueLossConfig())


def test_a_residual_critic_learns_what_the_group_does_not_know() -> None:
    config = AlgorithmConfig.model_validate({"value_loss": {"residual": True}, "advantage": {"lambda_policy": 1.0}})
    batch = batch_of([2, 1, 3, 2], [False] * 4, [1.0, -1.0, 1.0, 1.0])
    baselines = baselines_of(batch.rewards, batch.group_ids, config.value_loss)
    assert baselines is not None and baselines.tolist() == [-1.0, 1.0, 1.0, 1.0]
    assert baselines_of(batch.rewards, batch.group_ids, ValueLossConfig()) is None
    # A head of zeros is RLOO: with lambda 1 the advantage of each token is R less the mean of the others.
    targets(batch, baselines.repeat_interleave(batch.response_lengths), config)
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [2.0, 2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_no_update_is_reported_as_none() -> None:
    assert update_metrics("actor", [], ()) == {"actor/updates": 0.0}
    refused = StepResult(grad_norm=1.0, lr=1e-6, metrics={"policy_loss": 1.0}, updated=False)
    assert update_metrics("actor", [refused], ()) == {"actor/updates": 0.0}


def test_several_updates_are_reported_by_means_and_by_what_is_a_maximum_already() -> None:
    rows = [(1.0, 0.3, 4.0), (9.0, 0.1, 99.0), (2.0, 0.2, 7.0)]
    results = [StepResult(norm, lr, {"loss": norm, "ratio_max": top}) for norm, lr, top in rows]
    results[1].updated = False
    assert update_metrics("actor", results, ("ratio_max",)) == {
        "actor/loss": 1.5,
        "actor/ratio_max": 7.0,
        "actor/grad_norm": 1.5,
        "actor/grad_norm_max": 2.0,
        "actor/lr": 0.2,
        "actor/updates": 2.0,
    }


def test_groups_of_one_reward_are_a_share_of_all_groups() -> None:
    batch = batch_of([2, 3, 4, 5], [False] * 4, [1.0, 1.0, -1.0, 1.0])
    assert rollout_metrics(batch)["reward/frac_zero_std_groups"] == 0.5


def test_a_metric_without_responses_to_it_is_left_out() -> None:
    batch = batch_of([2, 3], [False, False], [1.0, 1.0])
    ones = torch.ones(5)
    found = value_metrics(spread(batch), ones, ones, torch.ones(2, dtype=torch.bool))
    assert found["critic/value_bias_correct"] == 0 and "critic/value_bias_incorrect" not in found
