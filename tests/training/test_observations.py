"""Tokens that the policy was given and did not write: no loss, no length, no metric; GAE steps over
them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import make_batch, spread, with_observation

from vapo_megatron.algorithms.advantages import reinforce_pp
from vapo_megatron.algorithms.gae import length_adaptive_lambda, monte_carlo_returns
from vapo_megatron.checkpoint.recorded_rollouts import RecordedRollouts, write_rollout
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import Share, pack
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.metrics import policy_metrics, rollout_metrics
from vapo_megatron.training.shards import ModelInput
from vapo_megatron.training.updates import correct_for_rollout, policy_loss, value_loss_of
from vapo_megatron.training.value_pretraining import Targets

LENGTHS = [(3, 4), (5, 9), (1, 30), (7, 2)]
OBSERVED = {0: (0, 2), 1: (4, 6), 2: (30, 5)}


def scored(observed: dict[int, tuple[int, int]] | None) -> ExperienceBatch:
    batch = make_batch(LENGTHS, spread=2.0, observed=observed)
    generator = torch.Generator().manual_seed(1)
    batch.values = torch.rand(batch.response_tokens, generator=generator)
    batch.old_logprobs = batch.rollout_logprobs + 0.3 * torch.randn(
        batch.response_tokens, generator=generator
    )
    batch.entropies = torch.rand(batch.response_tokens, generator=generator)
    return batch


def step(
    observed: dict[int, tuple[int, int]] | None, config: AlgorithmConfig
) -> tuple[ModelInput, dict[str, float]]:
    whole = spread(scored(observed))
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        recorder.add(rollout_metrics(whole.local) | policy_metrics(whole))
        estimate_advantages(whole, config, recorder)
        correct_for_rollout(whole, config.importance_sampling, recorder)
        row = recorder.write(1)
    part = ModelInput(whole.local, Share([[0, 1, 2, 3]], 4), whole.table, torch.arange(4), [], [])
    return part, {
        name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))
    }


@pytest.mark.parametrize("estimator", ["gae", "grpo", "reinforce_pp"])
def test_observations_change_nothing_but_what_models_read(estimator: str) -> None:
    settings: dict[str, Any] = {
        "advantage": {"estimator": estimator, "gamma": 0.97, "whiten": "full"},
        "policy_loss": {"positive_nll": {"coef": 0.1}},
        "importance_sampling": {"kind": "tis"},
    }
    if estimator != "reinforce_pp":
        del settings["advantage"]["gamma" if estimator != "gae" else "whiten"]
    config = AlgorithmConfig.model_validate(settings)
    (plain, plain_row), (with_them, row) = step(None, config), step(OBSERVED, config)
    assert row == plain_row and row[names.LENGTH] == 11.25
    expected = policy_loss(plain, config)
    found = policy_loss(with_them, config)
    for name in ("advantages", "weights", "nll_weights", "mean_weights", "importance"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert float(found.weights.sum()) == pytest.approx(1) and len(found.weights) == sum(
        r for _, r in LENGTHS
    )
    if estimator == "gae":
        assert torch.equal(
            value_loss_of(with_them, config.value_loss).weights,
            value_loss_of(plain, config.value_loss).weights,
        )
    assert (
        with_them.batch.lengths.tolist()
        == [7 + 2, 14 + 6, 31 + 5, 9]
        == with_them.global_table.lengths.tolist()
    )


def test_gae_steps_over_observations() -> None:
    """The recursion written out, on the tokens as they stand in the sequence."""
    config = AlgorithmConfig.model_validate(
        {"advantage": {"gamma": 0.97, "length_adaptive_alpha": 0.3}}
    )
    batch = step(OBSERVED, config)[0].batch
    assert batch.loss_mask is not None and batch.values is not None
    begin = [
        int(start + prompt)
        for start, prompt in zip(batch.cu_seqlens, batch.prompt_lengths, strict=False)
    ]
    mask = torch.cat(
        [batch.loss_mask[a:b] for a, b in zip(begin, batch.cu_seqlens[1:].tolist(), strict=True)]
    )
    bounds = torch.tensor([0, 6, 21, 56, 58])
    values = torch.full((58,), 77.0)
    rewards = torch.full((58,), 55.0)
    values[mask], rewards[mask] = batch.values, 0.0
    rewards[[5, 20, 50, 57]] = batch.rewards
    lam = length_adaptive_lambda(torch.tensor([4, 9, 30, 2]), 0.3)
    advantages = torch.zeros(58, dtype=torch.float64)
    returns = torch.zeros(58, dtype=torch.float64)
    for sample, (a, b) in enumerate(pairwise(bounds.tolist())):
        next_value = next_advantage = next_return = 0.0
        for token in reversed([token for token in range(a, b) if mask[token]]):
            reward = float(rewards[token])
            value = float(values[token])
            next_advantage = (
                reward + 0.97 * next_value - value + 0.97 * float(lam[sample]) * next_advantage
            )
            next_value = value
            next_return = reward + 0.97 * next_return
            advantages[token], returns[token] = next_advantage, next_return
    advantages = advantages.float()
    returns = returns.float()
    assert batch.advantages is not None and torch.allclose(
        batch.advantages, advantages[mask], atol=1e-6
    )
    assert batch.returns is not None and torch.allclose(batch.returns, returns[mask], atol=1e-6)


@pytest.mark.parametrize("cp", [1, 2])
def test_models_read_observations_and_output_responses_only(cp: int) -> None:
    batch = make_batch(LENGTHS, observed=OBSERVED)
    assert batch.loss_mask is not None
    written = batch.tokens[batch.loss_mask]
    seen = torch.zeros(batch.response_tokens, dtype=torch.int64)
    for rank in range(cp):
        micro = pack(batch, [2, 0, 3, 1], 2 * cp, 2 * cp, cp, rank)
        spoken = micro.response_index >= 0
        assert torch.equal(micro.labels[spoken], written[micro.response_index[spoken]].long())
        seen[micro.response_index[spoken]] += 1
    assert seen.tolist() == [1] * 45
    micro = pack(batch, [0], 1, 1, 1, 0)
    assert micro.ids.tolist() == batch.tokens[:8].tolist(), "observations are read"
    assert micro.response_index.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("credit", ["token", "turn"])
@pytest.mark.parametrize("truncated", ["terminal", "bootstrap"])
@pytest.mark.parametrize("kind", [0.9, "length_adaptive"])
def test_rewards_on_the_way_count_from_their_turn_on(
    credit: str, truncated: str, kind: float | str
) -> None:
    """GAE and returns against the sums written out in float64. Sample 1 has turns of 4 and 5
    tokens, and is cut off. A length-adaptive lambda counts tokens or turns."""
    gamma = 0.97
    alpha = 0.8
    advantages = {
        "gamma": gamma,
        "lambda_policy": kind,
        "length_adaptive_alpha": alpha,
        "credit": credit,
    }
    config = AlgorithmConfig.model_validate(
        {"advantage": advantages, "shaping": {"truncated": truncated}}
    )
    batch = scored(OBSERVED)
    batch.truncated = torch.tensor([False, True, False, False])
    batch.turn_rewards = torch.zeros(45)
    # The end of the first turn; in the midst of sample 2
    batch.turn_rewards[7], batch.turn_rewards[20] = (
        0.5,
        -0.25,
    )
    batch.rewards += torch.tensor([0.0, 0.5, -0.25, 0.0])
    whole = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder)
        row = recorder.write(1)
    values = batch.values.double().tolist()
    rewards = batch.turn_rewards.double().tolist()  # type: ignore[union-attr]
    bounds = [0, 4, 13, 43, 45]
    turns = (
        [[0], [4, 8], [13], [43]]
        if credit == "turn"
        else [list(range(a, b)) for a, b in pairwise(bounds)]
    )
    lambdas = []
    for sample, starts in enumerate(turns):
        end = bounds[sample + 1]
        goes_on = truncated == "bootstrap" and bool(batch.truncated[sample])
        after = values[end - 1] if goes_on else 0.0  # the last state stands for the one after it
        final = (
            0.0 if goes_on else float(batch.rewards[sample]) - sum(rewards[bounds[sample] : end])
        )
        lam = kind if isinstance(kind, float) else max(0.0, 1 - 1 / (alpha * len(starts)))
        lambdas.append(lam)
        advantage = target = 0.0
        following = values_after = after
        for start, stop in reversed(list(zip(starts, [*starts[1:], end], strict=True))):
            reward = sum(rewards[start:stop]) + (final if stop == end else 0.0)
            advantage = reward + gamma * values_after - values[start] + gamma * lam * advantage
            target = reward + gamma * following
            values_after = values[start]
            following = target
            assert whole.local.advantages is not None and whole.local.returns is not None
            assert whole.local.advantages[start:stop].tolist() == pytest.approx(
                [advantage] * (stop - start), abs=1e-5
            )
            assert whole.local.returns[start:stop].tolist() == pytest.approx(
                [target] * (stop - start), abs=1e-5
            )
    assert row["advantage/lambda_mean"] == pytest.approx(sum(lambdas) / 4)
    assert row["advantage/lambda_clamped"] == lambdas.count(0.0) / 4


def test_turn_values_stand_beside_turn_number_and_group() -> None:
    """Every first turn is worth 1 from its start on and every second one 0.5, whatever their
    lengths: the number of the turn says all, and so do the other responses of the group, less what
    the first turn has paid; values within turns are not read."""
    batch = make_batch([(2, 6)] * 4, observed={0: (2, 1), 1: (3, 1), 2: (1, 2), 3: (4, 2)})
    batch.group_ids = torch.tensor([0, 0, 1, 1])
    batch.rewards = torch.ones(4)
    batch.turn_rewards = torch.zeros(24)
    batch.values = torch.full((24,), 9.0)
    for sample, first_turn in enumerate((2, 3, 1, 4)):
        batch.turn_rewards[6 * sample + first_turn - 1] = 0.5
        batch.values[6 * sample], batch.values[6 * sample + first_turn] = 1.0, 0.5
    config = AlgorithmConfig.model_validate({"advantage": {"credit": "turn", "lambda_policy": 0.9}})
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(spread(batch), config, recorder)
        row = recorder.write(1)
    assert row["critic/turn_explained_variance"] == row["critic/turn_baseline_position_ev"] == 1.0
    assert row["critic/turn_baseline_loo_ev"] == row[names.BASELINE_LOO] == 1.0
    assert row[names.EXPLAINED_VARIANCE] < 0 and row[names.BASELINE_POSITION] < 1, "over tokens"


def test_a_critic_learns_and_is_measured_by_turns(tmp_path: Path) -> None:
    """Gamma discounts turns in value pretraining and in the metrics as it does in the targets."""
    after = (2, 3, 1, 4)
    batch = make_batch([(2, 6)] * 4, observed={s: (n, 1) for s, n in enumerate(after)})
    batch.rewards = torch.tensor([1.0, -1.0, 0.5, 2.0])
    expected = torch.cat(
        [
            torch.tensor([0.5 * reward] * n + [reward] * (6 - n))
            for n, reward in zip(after, batch.rewards.tolist(), strict=True)
        ]
    )
    record = RecordedRollouts(tmp_path)
    record.add(record.next_name, write_rollout(batch, tmp_path / record.next_name))
    config = AlgorithmConfig.model_validate(
        {"advantage": {"credit": "turn", "lambda_policy": 0.9, "gamma": 0.5}}
    )
    learnt = Targets(record, config).select(range(4)).local.returns
    assert learnt is not None and torch.allclose(learnt, expected)
    batch.values = expected
    whole = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder)
        row = recorder.write(1)
    assert whole.local.returns is not None and torch.allclose(whole.local.returns, expected)
    assert row[names.EXPLAINED_VARIANCE] == row["critic/turn_explained_variance"] == 1.0
    assert row[names.CALIBRATION_SLOPE] == pytest.approx(1.0)


def test_rewards_count_from_their_turn_on() -> None:
    earlier = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0])
    bounds = torch.tensor([0, 3, 5])
    rewards = torch.tensor([1.5, 2.0])
    expected = [0.9 * 0.5 + 0.81, 0.5 + 0.9, 1.0, 1.8, 2.0]
    found = (
        monte_carlo_returns(rewards, bounds, 0.9, earlier),
        reinforce_pp(rewards, torch.zeros(5), bounds, 0.9, earlier=earlier),
    )
    assert all(returns.tolist() == pytest.approx(expected) for returns in found)


def test_a_saved_group_keeps_its_mask() -> None:
    prompt = Prompt("0", "", "", (1, 2))
    plain = Sample(prompt, 0, 0, 7, [3, 4], [-1.0, -2.0], "stop", 0, 0)  # type: ignore[arg-type]
    observed = with_observation(plain, 1, 2)
    observed.turn_rewards = np.array([0.5, 0, 0, 0], dtype=np.float32)
    packed = pack_groups({5: [plain, observed]})
    (first, second) = unpack_groups(packed, lambda number: prompt, lambda ids: "text")[5]
    assert first.loss_mask is None and second.loss_mask is not None
    assert first.turn_rewards is None and second.turn_rewards.tolist() == [0.5, 0, 0, 0]
    assert second.loss_mask.tolist() == [
        True,
        False,
        False,
        True,
    ] and second.response_ids.tolist() == [3, 0, 1, 4]


def test_windows_begin_among_the_tokens_that_the_policy_wrote() -> None:
    sample = Sample(
        Prompt("0", "", "", (1,)), 0, 0, 0, [3, 4, 5], [-1.0] * 3, "abort", 0, 0, reward=0.0
    )  # type: ignore[arg-type]
    begun = with_observation(sample, 1, 2)
    begun.window_start = 4
    batch = from_samples([begun])
    assert batch.window_starts is not None and batch.window_starts.tolist() == [2]
    assert batch.table().new_lengths.tolist() == [1]


@pytest.mark.parametrize("mask", [[True], [False, False]])
def test_a_mask_of_another_length_or_without_a_token_is_refused(mask: list[bool]) -> None:
    with pytest.raises(
        ValueError, match=r"sample 3/1: its loss mask is .* expected at least one of 2"
    ):
        Sample(
            Prompt("0", "", "", (1,)),
            3,
            1,
            0,
            [3, 4],
            [-1.0] * 2,
            "stop",
            0,
            0,
            loss_mask=np.array(mask),
        )  # type: ignore[arg-type]
