"""Calibrated values and trust in the steps of a run, written out response by response."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from batches import spread
from torch import Tensor

from vapo_megatron.algorithms import calibration
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig, ShapingConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.credit import policy_lambda
from vapo_megatron.training.past_returns import calibrated_advantages
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.token_rewards import returns_known

# By group: (response tokens, reward, cut off). Of the last group one return alone is known with
# truncated=mask.
DRAWN = [
    [(3, 1.0, False), (9, -1.0, False), (20, 1.0, True)],
    [(5, -1.0, False), (6, 1.0, False), (13, 1.0, False)],
    [(2, 1.0, False), (8, -1.0, True)],
]


def batch_of(step: int) -> ShardedBatch:
    drawn = [
        Sample(
            Prompt(str(g), "", "", (1,)),
            g,
            i,
            0,
            [3] * n,
            [0.0] * n,
            "length" if cut else "stop",
            0,
            0,
            reward=r,
        )  # type: ignore[arg-type]
        for g, members in enumerate(DRAWN)
        for i, (n, r, cut) in enumerate(members)
    ]
    batch = spread(from_samples(drawn))
    generator = torch.Generator().manual_seed(step)
    own = batch.local
    ends = torch.repeat_interleave(own.rewards, own.response_lengths)
    # On average 3 R: the slope is below a half, so that trust is neither 0 nor 1.
    own.values = 3 * ends + torch.randn(own.response_tokens, generator=generator)
    batch.fill(shaped_rewards=own.rewards)
    return batch


def lambda_return(returns: float, values: Tensor, lam: float) -> Tensor:
    """GAE of a response whose reward comes at its end."""
    advantage = 0.0
    found = []
    for t in reversed(range(len(values))):
        after = returns if t + 1 == len(values) else float(values[t + 1])
        advantage = after - float(values[t]) + (lam * advantage if t + 1 < len(values) else 0.0)
        found.append(advantage)
    return torch.tensor(found[::-1])


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("truncated", ["terminal", "mask"])
def test_the_advantages_of_three_steps_are_those_written_out(truncated: str, trusted: bool) -> None:
    history = ReturnHistory()
    shaping = ShapingConfig.model_validate({"truncated": truncated})
    for step in range(3):
        batch = batch_of(step)
        past = history.past
        own = batch.local
        table = batch.table
        assert own.values is not None
        known = returns_known(table.truncated, shaping)
        bounds = own.response_cu_seqlens.tolist()
        rewards = place_terminal(own.rewards, own.response_cu_seqlens, own.response_tokens)
        lam = 1 - 1 / (own.response_lengths + 1.0)
        found, row = calibrated_advantages(
            batch,
            rewards,
            lam,
            known,
            history,
            AdvantageConfig(calibration="trust" if trusted else "values"),
        )

        returns = own.rewards.tolist()
        siblings = []
        first = []
        for s in range(batch.samples):
            others = [o for o in range(batch.samples) if o != s and known[o] and known[s]]
            group = [o for o in others if table.group_ids[o] == table.group_ids[s]]
            siblings.append(sum(returns[o] for o in group) / max(len(group), 1))
            apart = [o for o in others if table.group_ids[o] != table.group_ids[s]]
            first.append(
                siblings[s] if group else sum(returns[o] for o in apart) / max(len(apart), 1)
            )
        trust = 0.0
        calibrated = []
        c = (
            calibration.coefficients(past).bins
            if past is not None
            else torch.zeros(calibration.BINS, 3)
        )
        for s, (begin, end) in enumerate(pairwise(bounds)):
            bins = [c[(t + 1).bit_length() - 1].tolist() for t in range(end - begin)]
            raw = own.values[begin:end].tolist()
            fitted = [b[0] + b[1] * v + b[2] * siblings[s] for b, v in zip(bins, raw, strict=True)]
            calibrated.append(
                torch.tensor(fitted if past is not None else [first[s]] * (end - begin))
            )
        if past is not None:
            trust = float(((2 * c[:, 1]).clamp(0, 1) * past.responses).sum() / past.responses.sum())
            assert 0.2 < trust < 0.95, "both parts of the advantage count"
        expected = [
            (trust if trusted else 1.0) * lambda_return(returns[s], values, float(lam[s]))
            + (1 - trust if trusted else 0.0) * (returns[s] - values)
            for s, values in enumerate(calibrated)
        ]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
        assert row[names.TRUST] == pytest.approx(trust if trusted else 1.0)
        assert (names.CRITIC_SLOPE in row) == (names.GROUP_WEIGHT in row) == (past is not None)
        kept = [s for s in range(batch.samples) if known[s]]
        targets = torch.cat([torch.full((len(calibrated[s]),), returns[s]) for s in kept])
        errors = targets - torch.cat([calibrated[s] for s in kept])
        explained = 1 - float(errors.var() / targets.var())
        assert row[names.EXPLAINED_CALIBRATED] == pytest.approx(explained, abs=1e-3)
        sums = calibration.response_sums(own.values[None], own.response_cu_seqlens)[known]
        moments = calibration.moments(
            sums, own.rewards[known], torch.tensor(siblings, dtype=torch.float64)[None, known]
        )
        after = moments if past is None else past.followed_by(moments)
        assert history.past is not None
        for one, other in zip(history.past, after, strict=True):
            torch.testing.assert_close(one, other)
        saved = json.loads(json.dumps(history.state()))  # as a checkpoint keeps it
        history = ReturnHistory(saved)
        assert history.state() == saved != [], "to the bit"


@pytest.mark.parametrize("kind", ["trust", "values"])
def test_the_config_says_whether_trust_counts_and_which_lambda(kind: str, tmp_path: Path) -> None:
    """The policy's lambda, not the critic's, and g only where configured."""
    config = AlgorithmConfig.model_validate(
        {"advantage": {"calibration": kind, "length_adaptive_floor": 0.5}}
    )
    history = ReturnHistory()
    apart = ReturnHistory()
    for step in range(2):
        batch = batch_of(step)
        own = batch.local
        lam = policy_lambda(own.response_lengths, config.advantage)
        rewards = place_terminal(own.rewards, own.response_cu_seqlens, own.response_tokens)
        known = torch.ones(batch.samples, dtype=torch.bool)
        wanted, _ = calibrated_advantages(batch, rewards, lam, known, apart, config.advantage)
        with Recorder(tmp_path, MonitoringConfig(), is_main_rank=False) as recorder:
            estimate_advantages(batch, config, recorder, history=history)
        assert own.advantages is not None and torch.equal(own.advantages, wanted)


@pytest.mark.parametrize("truncated", ["terminal", "mask"])
def test_tether_mixes_by_what_past_steps_say(truncated: str) -> None:
    """b = (1 - rho) B + rho V, with the rho of the steps before, response by response."""
    history = ReturnHistory()
    shaping = ShapingConfig.model_validate({"truncated": truncated})
    rho = 0.0
    for step in range(3):
        batch = batch_of(step)
        own = batch.local
        table = batch.table
        assert own.values is not None
        known = returns_known(table.truncated, shaping)
        bounds = own.response_cu_seqlens.tolist()
        returns = own.rewards.tolist()
        lam = 1 - 1 / (own.response_lengths + 1.0)
        rewards = place_terminal(own.rewards, own.response_cu_seqlens, own.response_tokens)
        found, row = calibrated_advantages(
            batch, rewards, lam, known, history, AdvantageConfig(calibration="tether")
        )

        means = []
        for s in range(batch.samples):
            others = [o for o in range(batch.samples) if o != s and known[o] and known[s]]
            group = [o for o in others if table.group_ids[o] == table.group_ids[s]] or others
            means.append(sum(returns[o] for o in group) / max(len(group), 1))
        expected = []
        gain = distance = 0.0
        for s, (begin, end) in enumerate(pairwise(bounds)):
            values = own.values[begin:end]
            mixed = (1 - rho) * means[s] + rho * values
            expected.append(lambda_return(returns[s], mixed, float(lam[s])))
            if known[s]:
                gain += float(((returns[s] - means[s]) * (values - means[s])).sum())
                distance += float((values - means[s]).square().sum())
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
        assert row[names.CRITIC_SLOPE] == row[names.TRUST] == pytest.approx(rho)
        assert row[names.GROUP_WEIGHT] == pytest.approx(1 - rho)
        assert 0 < gain < distance
        rho = 0.95 * rho + 0.05 * gain / distance
        saved = json.loads(json.dumps(history.state()))  # as a checkpoint keeps it
        assert saved == [pytest.approx(rho)]
        history = ReturnHistory(saved)
        assert history.state() == saved, "to the bit"


@pytest.mark.parametrize("kind", ["values", "trust", "tether"])
def test_rewards_of_earlier_turns_are_not_predicted_again(kind: str) -> None:
    """Half of a return that varies by group is paid at the second token: a critic that knows what
    is left to come leaves no advantage, and explains all of it."""
    config = AlgorithmConfig.model_validate({"advantage": {"calibration": kind}})
    history = ReturnHistory()
    for step in range(3):
        batch = batch_of(step)
        own = batch.local
        own.rewards.copy_(batch.table.group_ids.float() + 1)
        half = own.rewards / 2
        first = own.response_cu_seqlens[:-1]
        own.turn_rewards = torch.zeros(own.response_tokens)
        own.turn_rewards[first + 1] = half
        own.values = torch.repeat_interleave(half, own.response_lengths)
        own.values[first] += half
        own.values[first + 1] += half
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            estimate_advantages(batch, config, recorder, history=history)
            row = recorder.write(1)
    assert own.advantages is not None
    torch.testing.assert_close(own.advantages, torch.zeros(own.response_tokens), atol=0.3, rtol=0)
    assert row[names.EXPLAINED_VARIANCE] == pytest.approx(1)
    assert row[names.EXPLAINED_CALIBRATED] > 0.95
