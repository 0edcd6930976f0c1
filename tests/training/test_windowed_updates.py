"""What a step with windows teaches: the policy new tokens alone, the critic whole responses once
they are finished."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import Share
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.metrics import advantage_metrics, policy_metrics, rollout_metrics
from vapo_megatron.training.shards import ModelInput
from vapo_megatron.training.token_rewards import returns_known, teaches_critic
from vapo_megatron.training.updates import correct_for_rollout, policy_loss, value_loss_of

# Response tokens, the first new one, whether it continues: begun, continuing, finished in its
# second window, cut finally.
RESPONSES = [(3, 0, True), (6, 3, True), (5, 3, False), (7, 6, False)]
REWARDS = [-1.0, -1.0, 1.0, -1.0]
NEW = torch.tensor(
    [position >= start for length, start, _ in RESPONSES for position in range(length)]
)
FINISHED = torch.tensor([not goes_on for length, _, goes_on in RESPONSES for _ in range(length)])


def batch_of() -> Any:
    samples = []
    for number, ((length, start, goes_on), reward) in enumerate(
        zip(RESPONSES, REWARDS, strict=True)
    ):
        reason = "abort" if goes_on else "stop" if reward > 0 else "length"
        prompt = Prompt(str(number), "", "", (1, 2))
        ids = list(range(3, 3 + length))
        sample = Sample(
            prompt,
            number,
            0,
            0,
            ids,
            [-1.0] * length,
            reason,
            0,
            0,
            reward=reward,
            correct=reward > 0,
        )  # type: ignore[arg-type]
        sample.window_start = start
        samples.append(sample)
    batch = from_samples(samples)
    generator = torch.Generator().manual_seed(1)
    batch.values = torch.rand(batch.response_tokens, generator=generator)
    batch.old_logprobs = batch.rollout_logprobs + 0.3 * torch.randn(
        batch.response_tokens, generator=generator
    )
    return batch


def step_of(settings: dict[str, Any]) -> tuple[AlgorithmConfig, ModelInput]:
    shaping = {"shaping": {"truncated": "window"}, "policy_loss": {"positive_nll": {"coef": 0.1}}}
    config = AlgorithmConfig.model_validate(shaping | settings)
    whole = spread(batch_of())
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder)
        correct_for_rollout(whole, config.importance_sampling, recorder)
    return config, ModelInput(
        whole.local, Share([[0, 1, 2, 3]], 4), whole.table, torch.arange(4), [], []
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_policy_learns_from_each_token_once(aggregation: str) -> None:
    loss_settings = {"policy_loss": {"aggregation": aggregation, "positive_nll": {"coef": 0.1}}}
    config, part = step_of(loss_settings)
    loss = policy_loss(part, config)
    for weights in (loss.weights, loss.mean_weights, loss.nll_weights):
        assert weights[~NEW].tolist() == [0.0] * int((~NEW).sum()), "trained before"
        assert float(weights.sum()) == pytest.approx(1), "its denominator counts new tokens alone"
    assert (loss.weights[NEW] > 0).all()
    assert loss.nll_weights.nonzero().flatten().tolist() == [12, 13], "of the only correct response"


def test_critic_learns_finished_rewards_on_all_their_tokens() -> None:
    config, part = step_of({})
    loss = value_loss_of(part, config.value_loss, teaches_critic(part.global_table, config.shaping))
    assert torch.equal(loss.weights > 0, FINISHED)
    assert loss.targets[FINISHED].tolist() == pytest.approx([1.0] * 5 + [-1.0] * 7)


def test_target_0_of_unfinished_response_may_exceed_value_range() -> None:
    config, part = step_of({})
    bounded = ValueLossConfig(squash="tanh", low=1.0, high=2.0)
    part.batch.returns = torch.where(FINISHED, 1.5, 0.0)
    loss = value_loss_of(part, bounded, teaches_critic(part.global_table, config.shaping))
    assert torch.equal(loss.weights > 0, FINISHED)
    part.batch.returns[-1] = 0.5
    with pytest.raises(
        BadInput, match=r"low\.\.high=1\.\.2 does not contain the value target 0\.5"
    ):
        value_loss_of(part, bounded, teaches_critic(part.global_table, config.shaping))


def test_window_bootstraps_and_a_finished_response_has_reward() -> None:
    _, part = step_of({"advantage": {"lambda_policy": 1.0}})
    values = part.batch.values
    advantages = part.batch.advantages
    torch.testing.assert_close(advantages[3:9], values[8] - values[3:9], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(advantages[14:21], -1.0 - values[14:21], atol=1e-6, rtol=1e-6)


def test_whitening_and_metrics_leave_out_what_they_do_not_know() -> None:
    _, part = step_of({"advantage": {"whiten": "full"}})
    assert part.batch.advantages[~NEW].tolist() == [0.0] * int((~NEW).sum())
    assert float(part.batch.advantages[NEW].mean()) == pytest.approx(0, abs=1e-6)
    batch = batch_of()
    finished = {
        "rollout/goes_on_share": 0.5,
        "response_length/repeated": 0.0,
        "reward/mean": 0.0,
        "reward/min": -1.0,
        "reward/max": 1.0,
        "accuracy/mean": 0.5,
        "response_length/mean": 6.0,
        "response_length/min": 5.0,
        "response_length/max": 7.0,
    }
    found = rollout_metrics(batch)
    assert finished.items() <= found.items() and names.TRUNCATED not in found
    batch.truncated[:] = True
    assert rollout_metrics(batch) == {"rollout/goes_on_share": 1.0, "response_length/repeated": 0.0}


def test_old_windows_are_no_gap_between_engine_and_trainer() -> None:
    whole = spread(batch_of())
    own = whole.local
    assert own.old_logprobs is not None
    # The trainer has moved on since: by 3 nats where earlier steps wrote, by nothing where this one
    # did.
    own.old_logprobs = own.rollout_logprobs + torch.where(NEW, 0.0, 3.0)
    own.entropies = torch.where(NEW, 1.0, 9.0)
    row = policy_metrics(whole)
    assert (row[names.TRAIN_INFER_KL], row[names.TRAIN_INFER_KL_MAX], row[names.ENTROPY]) == (
        0,
        0,
        1,
    )
    assert row["actor/train_infer_logprob_diff_max"] == 0
    own.advantages = torch.where(NEW, 0.5, -9.0)
    whole.fill(shaped_rewards=own.rewards)
    finished = {"advantage/mean": 0.5, "advantage/std": 0.0, "reward/shaped_mean": 0.0}
    assert finished.items() <= advantage_metrics(whole).items()
    own.truncated[:] = whole.table.truncated[:] = True
    assert "reward/shaped_mean" not in advantage_metrics(whole)


def test_pretraining_truncation_counts_as_wrong_like_last_window() -> None:
    cut = torch.tensor([True, False])
    windows = config_of({}, {})
    without = config_of({"windows": 1}, {})
    assert returns_known(cut, windows.pretraining_algorithm.shaping).tolist() == [True, True]
    assert returns_known(cut, without.pretraining_algorithm.shaping).tolist() == [False, True]
    assert windows.algorithm.shaping.truncated == "window", (
        "training itself has continuing responses"
    )


def config_of(rollout: dict[str, Any], algorithm: dict[str, Any]) -> TrainConfig:
    shaping = {"shaping": {"truncated": "window"}, "advantage": {"lambda_critic": 1.0}}
    tree = {
        "model": {"path": "model"},
        "data": {"train": "unread.jsonl"},
        "sampling": {"max_new_tokens": 24},
        "rollout": {"windows": 3} | rollout,
        "algorithm": shaping | algorithm,
    }
    return TrainConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("rollout", "algorithm", "message"),
    [
        ({"windows": 0}, {}, "greater than or equal to 1"),
        ({}, {"shaping": {}}, "windows=3 with algorithm.shaping.truncated=terminal"),
        (
            {"partial_responses": {"oversampling": 1.5}},
            {},
            "windows=3 with partial_responses.oversampling=1.5",
        ),
        ({"asynchronous": {"max_staleness": 1}}, {}, "windows=3 with asynchronous.max_staleness=1"),
        ({"router_replay": True}, {}, "windows=3 with router_replay=true"),
        (
            {},
            {"dynamic_sampling": {"max_rounds": 10}},
            "with algorithm.dynamic_sampling.max_rounds=10",
        ),
        (
            {},
            {"advantage": {"function": "a:b"}},
            "with algorithm.advantage.function=a:b: .* which has no reward yet",
        ),
        (
            {},
            {"policy_loss": {"kind": "gspo", "aggregation": "sequence_mean"}},
            "with algorithm.policy_loss.kind=gspo",
        ),
    ],
)
def test_what_windows_do_not_go_with_is_refused_by_name(
    rollout: dict[str, Any], algorithm: dict[str, Any], message: str
) -> None:
    config_of({}, {})
    with pytest.raises(ValueError, match=message):
        config_of(rollout, algorithm)
