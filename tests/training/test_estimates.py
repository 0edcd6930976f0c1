"""Value targets, whitening and baselines of a batch, as a step makes them."""

from typing import Any

import pytest
import torch
from batches import spread
from torch import Tensor

from vapo_megatron.algorithms import policy_loss, value_loss
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.token_loss import StepResult
from vapo_megatron.training.advantages import gae, whiten
from vapo_megatron.training.credit import turns_of
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import importance_metrics, rollout_metrics, value_metrics
from vapo_megatron.training.token_rewards import returns_known, token_rewards
from vapo_megatron.training.updates import check_targets, update_metrics


def batch_of(
    lengths: list[int], truncated: list[bool], rewards: list[float], size: int = 2
) -> ExperienceBatch:
    samples = []
    for s, (length, cut, reward) in enumerate(zip(lengths, truncated, rewards, strict=True)):
        prompt = Prompt(str(s // size), "", "", (1, 2))
        finish = "length" if cut else "stop"
        tokens = [3] * length
        logprobs = [-1.0] * length
        samples.append(
            Sample(
                prompt,
                s // size,
                s % size,
                0,
                tokens,
                logprobs,
                finish,
                0,
                0,
                reward=reward,
                correct=reward > 0,
            )
        )
    return from_samples(samples)


def targets(batch: ExperienceBatch, values: Tensor, config: AlgorithmConfig) -> Tensor:
    batch.values = values
    batch.shaped_rewards = batch.rewards
    gae(batch, token_rewards(batch, config), config, batch.response_lengths)
    assert batch.returns is not None
    return batch.returns


def bootstrapping(**advantage: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"shaping": {"truncated": "bootstrap"}, "advantage": advantage}
    )


def test_values_of_truncated_responses_stay_where_they_are() -> None:
    """With the reward of a wrong answer beside the bootstrap each pass took 1 from them: after 40,
    V = -40."""
    config = bootstrapping(lambda_critic=1.0)
    batch = batch_of([6, 4], [True, False], [-1.0, 1.0])
    values = torch.zeros(10)
    for _ in range(40):
        values = targets(batch, values, config)
    assert values[:6].tolist() == [0.0] * 6, "nothing is known of how it would have ended"
    assert values[6:].tolist() == [1.0] * 4


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_bootstrapped_target_is_the_value_of_last_known_state(lam: float) -> None:
    batch = batch_of([3, 1], [True, True], [-1.0, -1.0])
    values = torch.tensor([0.1, 0.2, 0.5, -0.3])
    found = targets(batch, values, bootstrapping(lambda_critic=lam))
    assert found[2] == values[2] and found[3] == values[3]
    assert float(found[0]) == pytest.approx(
        {0.0: 0.2, 0.9: 0.1 * 0.2 + 0.9 * 0.5, 1.0: 0.5}[lam], abs=1e-6
    )


def test_bootstrapped_response_keeps_rewards_of_its_turns() -> None:
    # What the turns earned, and a verdict of -1 and 1
    batch = batch_of([3, 3], [True, False], [-0.75, 1.25])
    batch.turn_rewards = torch.tensor([0.25, 0.0, 0.0, 0.0, 0.25, 0.0])
    batch.shaped_rewards = batch.rewards
    assert token_rewards(batch, bootstrapping()).tolist() == [0.25, 0, 0, 0, 0.25, 1.0]
    assert token_rewards(batch, AlgorithmConfig()).tolist() == [0.25, 0, -1.0, 0, 0.25, 1.0]


def test_turns_end_where_something_is_observed() -> None:
    batch = batch_of([3, 2], [False, False], [1.0, 1.0])
    bounds, responses = turns_of(batch)
    assert bounds.tolist() == [0, 3, 5] and responses.tolist() == [0, 1, 2], (
        "a response is one turn"
    )
    batch.loss_mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    batch.cu_seqlens = torch.tensor([0, 6, 10])
    batch.observation_lengths = torch.tensor([1, 0])
    bounds, responses = turns_of(batch)
    assert bounds.tolist() == [0, 2, 3, 5] and responses.tolist() == [0, 2, 3]


def test_truncated_responses_without_a_return_are_not_measured() -> None:
    truncated = torch.tensor([True, False])
    assert returns_known(truncated, bootstrapping().shaping).tolist() == [False, True]
    assert returns_known(truncated, AlgorithmConfig().shaping).tolist() == [True, True]


def test_whitening_counts_the_tokens_that_carry_loss() -> None:
    advantages = torch.tensor([1.0, 3.0, 900.0, 900.0, 900.0, 5.0, 7.0, -900.0])
    batch = spread(batch_of([2, 3, 2, 1], [False] * 4, [1.0] * 4))
    batch.fill(selected=torch.tensor([True, False, True, False]))
    batch.local.advantages = advantages
    whiten(batch, AdvantageConfig(whiten="full"))
    found = batch.local.advantages
    kept = torch.tensor([1.0, 3.0, 5.0, 7.0])
    expected = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(found[[0, 1, 5, 6]], expected, atol=1e-6, rtol=1e-6)
    assert found[[2, 3, 4, 7]].tolist() == [0.0] * 4


def test_a_ratio_beyond_all_bounds_is_reported_as_a_number() -> None:
    assert policy_loss.bounded_ratio(torch.tensor([1000.0])).isfinite().all()
    batch = spread(batch_of([2], [False], [1.0]))
    found = importance_metrics(batch, torch.ones(2), torch.tensor([0.0, 500.0]))
    assert torch.tensor(list(found.values())).isfinite().all()


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
        with pytest.raises(
            BadInput, match=f"low..high=-1..1 does not contain the value target {target}:"
        ):
            check_targets(torch.tensor([0.0, float(target)]), config)
    check_targets(torch.tensor([1.5]), ValueLossConfig())


def test_no_update_is_reported_as_none() -> None:
    assert update_metrics("actor", [], ()) == {"actor/updates": 0.0}
    refused = StepResult(grad_norm=1.0, lr=1e-6, metrics={"policy_loss": 1.0}, updated=False)
    assert update_metrics("actor", [refused], ()) == {"actor/updates": 0.0}


def test_several_updates_are_reported_by_means_and_maxima() -> None:
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
