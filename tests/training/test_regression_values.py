"""Values by regression in the steps of a run: written out, on any ranks, through checkpoints, by
turns."""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import spread, whole_of, with_observation
from ranks import run_ranks
from torch import Tensor

from vapo_megatron.algorithms import calibration, regression
from vapo_megatron.algorithms.gae import segmented_gae, turn_gae
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.credit import turns_of
from vapo_megatron.training.return_history import ReturnHistory

EVERY = RegressionConfig(entropy=True, history=True)
TRUST = AlgorithmConfig.model_validate(
    {"advantage": {"calibration": "trust", "length_adaptive_floor": 0.5}}
)
GROUPS = 6
SIZE = 4


def samples_of(step: int, observed: bool = False) -> list[Sample]:
    """Six groups of four responses of a vocabulary of two, which share prefixes; every fifth one is
    cut off."""
    random = np.random.default_rng(step)
    samples = []
    for group in range(GROUPS):
        for index in range(SIZE):
            n = int(random.integers(3, 12 + 4 * group))
            logprobs = -random.random(n, dtype=np.float32)
            slips = bool(random.random() < 0.5)
            logprobs[n // 3] -= 3 * slips
            right = slips == bool(random.random() < 0.1)
            sample = Sample(
                Prompt(str(group % 4), "", "", (5, 6, 7)[: 1 + group % 3]),
                group,
                index,
                0,
                random.integers(0, 2, n, dtype=np.int32),
                logprobs,
                "length" if random.random() < 0.2 else "stop",
                0,
                0,
                reward=1.0 if right else -1.0,
                correct=right,
            )  # type: ignore[arg-type]
            samples.append(with_observation(sample, n // 2, 1 + index % 2) if observed else sample)
    return samples


def rollout(step: int, observed: bool = False) -> ExperienceBatch:
    batch = from_samples(samples_of(step, observed))
    chance = torch.Generator().manual_seed(step)
    batch.entropies = torch.rand(batch.response_tokens, generator=chance)
    return batch


def estimated(
    batch: ExperienceBatch, history: ReturnHistory, config: AlgorithmConfig = TRUST
) -> tuple[ExperienceBatch, dict[str, Any]]:
    """Collective: a batch with its advantages, whole, and its metrics."""
    sharded = spread(batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(sharded, config, recorder, history=history)
        row = recorder.write(1)
    kept = {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))}
    return whole_of(sharded), kept


def columns_written_out(batch: ExperienceBatch) -> tuple[Tensor, Tensor]:
    """prefix, surprise and siblings by loops over responses: [4, T] and [1, S]."""
    texts = [batch.tokens[start:end].tolist() for start, end in pairwise(batch.cu_seqlens.tolist())]
    rewards = batch.rewards.tolist()
    by_token = []
    siblings = []
    bounds = batch.response_cu_seqlens.tolist()
    for s, text in enumerate(texts):
        others = [o for o in range(len(texts)) if o // SIZE == s // SIZE and o != s]
        siblings.append(sum(rewards[o] for o in others) / len(others))
        value = siblings[-1]
        prompt = int(batch.prompt_lengths[s])
        logprobs = batch.rollout_logprobs[bounds[s] : bounds[s + 1]].double()
        for t in range(bounds[s + 1] - bounds[s]):
            end = prompt + t
            same = [o for o in others if len(texts[o]) > end and texts[o][:end] == text[:end]]
            if t and same:
                value = (sum(rewards[o] for o in same) + value) / (len(same) + 1)
            earlier = logprobs[:t]
            by_token.append(
                [
                    value,
                    float(earlier.sum()) / 5,
                    min(earlier.tolist(), default=0.0) / 5,
                    float((earlier.exp() < 0.2).sum()),
                ]
            )
    return torch.tensor(by_token, dtype=torch.float64).t(), torch.tensor([siblings]).double()


def test_three_steps_are_those_written_out() -> None:
    history = ReturnHistory(regression=RegressionConfig())
    past = None
    predictions = None
    features = ("prefix", "surprise", "surprise", "surprise", "siblings")
    for step in range(3):
        batch, row = estimated(rollout(step), history)
        bounds = batch.response_cu_seqlens
        returns = batch.rewards
        columns, siblings = columns_written_out(batch)
        trust = regression.trust(predictions)
        assert row[names.TRUST] == pytest.approx(trust)
        assert (trust > 0) == (step == 2), "nothing was predicted for the first step"
        values = torch.repeat_interleave(siblings[0], bounds.diff())
        now = calibration.moments(calibration.response_sums(columns, bounds), returns, siblings)
        if past is not None:
            fit = regression.fitted(past, features, by_position=True)
            values = calibration.predicted(columns, siblings, bounds, fit.bins)
            of_values = calibration.response_sums(values[None], bounds)
            seen = calibration.moments(of_values, returns, torch.zeros(0, batch.samples))
            predictions = seen if predictions is None else predictions.followed_by(seen)
            shares = {k: v for k, v in row.items() if k.startswith(names.REGRESSION_SHARE)}
            assert {name.removeprefix(names.REGRESSION_SHARE) for name in shares} == {
                "position",
                "prefix",
                "surprise",
                "siblings",
            }
        past = now if past is None else past.followed_by(now)
        assert batch.values is not None and batch.advantages is not None
        torch.testing.assert_close(batch.values, values.float())
        lam = (1 - 1 / (0.05 * bounds.diff())).clamp(min=0.5).float()
        rewards = place_terminal(returns, bounds, len(values))
        bootstrapped, whole = (
            segmented_gae(rewards, values.float(), bounds, each) for each in (lam, 1.0)
        )
        torch.testing.assert_close(batch.advantages, trust * bootstrapped + (1 - trust) * whole)
        assert 0 < row[names.SHARED_PREFIX] < 1
        assert not any(name.startswith(names.CRITIC_FAULT) for name in row)


def three_steps(observed: bool) -> Any:
    """On every rank: values, advantages and metrics of three steps, and what a checkpoint would
    hold."""
    history = ReturnHistory(regression=EVERY)
    found = []
    for step in range(3):
        batch, row = estimated(rollout(step, observed), history)
        assert batch.values is not None and batch.advantages is not None
        found.append((batch.values.numpy(), batch.advantages.numpy(), row))
    return found, json.dumps(history.state()), history.tracked_state()()


@pytest.mark.parametrize("observed", [pytest.param(False, marks=pytest.mark.full), True])
def test_every_number_of_ranks_gives_the_same_to_the_bit(observed: bool) -> None:
    alone = three_steps(observed)
    for steps, state, tracked in (
        *run_ranks(2, three_steps, observed),
        *run_ranks(3, three_steps, observed),
    ):
        assert (state, tracked) == alone[1:]
        for (values, advantages, row), (v, a, wanted) in zip(steps, alone[0], strict=True):
            assert np.array_equal(values, v) and np.array_equal(advantages, a)
            assert row == wanted


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    history = ReturnHistory(regression=EVERY)
    assert history.state() == []
    for step in range(3):
        saved = json.loads(json.dumps(history.state()))
        resumed = ReturnHistory(saved, history.tracked_state()(), EVERY)
        ours, row = estimated(rollout(step), history)
        theirs, again = estimated(rollout(step), resumed)
        assert torch.equal(ours.values, theirs.values)  # type: ignore[arg-type]
        assert row == again and resumed.state() == history.state()


def test_other_features_begin_with_new_statistics(caplog: pytest.LogCaptureFixture) -> None:
    history = ReturnHistory(regression=EVERY)
    estimated(rollout(1), history)
    changed = ReturnHistory(history.state(), regression=RegressionConfig(prefix=False))
    with caplog.at_level(logging.WARNING):
        _, row = estimated(rollout(2), changed)
    assert "other features" in caplog.text
    fresh = ReturnHistory(regression=RegressionConfig(prefix=False))
    assert row == estimated(rollout(2), fresh)[1]
    plain = ReturnHistory(history.state())
    assert plain.past is None and plain.state() == [], "a calibration has nothing of it"


def test_values_know_neither_their_own_return_nor_later_tokens() -> None:
    history = ReturnHistory(regression=EVERY)
    estimated(rollout(1), history)
    state = json.dumps(history.state()), history.tracked_state()()
    at = 9
    cut = 4

    def values(change: bool) -> Tensor:
        past = ReturnHistory(json.loads(state[0]), state[1], EVERY)
        batch = rollout(2)
        start = int(batch.response_cu_seqlens[at])
        place = int(batch.cu_seqlens[at] + batch.prompt_lengths[at]) + cut
        if change:
            batch.rewards[at] *= -1
            batch.tokens[place] = 3
            batch.rollout_logprobs[start + cut :] -= 5
            assert batch.entropies is not None
            batch.entropies[start + cut :] += 5
        found, _ = estimated(batch, past)
        assert found.values is not None
        return found.values[start : start + cut + 2]

    before = values(False)
    after = values(True)
    assert torch.equal(before[: cut + 1], after[: cut + 1])
    assert before[cut + 1] != after[cut + 1], "the next state knows the token"


def test_equal_tokens_after_other_observations_are_another_state() -> None:
    prompt = Prompt("a", "", "", (1, 2))
    drawn = [
        Sample(
            prompt, 0, i, 0, np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), "stop", 0, 0
        )  # type: ignore[arg-type]
        for i in range(2)
    ]
    for sample, reward in zip(drawn, (1.0, -1.0), strict=True):
        sample.reward = reward
        sample.correct = reward > 0
    only = RegressionConfig(siblings=False, surprise=False)

    def shared(samples: list[Sample]) -> float:
        history = ReturnHistory(regression=only)
        return float(estimated(from_samples(samples), history)[1][names.SHARED_PREFIX])

    assert shared(drawn) == 1
    same = [with_observation(sample, 2, 2) for sample in drawn]
    assert shared(same) == 1
    other = [with_observation(drawn[0], 2, 2), with_observation(drawn[1], 2, 3)]
    assert shared(other) == 0.5, "of the two states behind the first, that before the observation"


def test_credit_by_turns_takes_values_of_first_states() -> None:
    by_turn = AlgorithmConfig.model_validate(
        {"advantage": {"credit": "turn", "lambda_policy": 0.5}}
    )
    history = ReturnHistory(regression=RegressionConfig(prefix=False))
    for step in range(2):
        batch, row = estimated(rollout(step, observed=True), history, by_turn)
        turns, responses = turns_of(batch)
        assert len(turns) - 1 == 2 * batch.samples and row[names.TRUST] == 1
        assert batch.values is not None and batch.advantages is not None
        for start, end in pairwise(turns.tolist()):
            assert len(batch.values[start:end].unique()) == 1
        rewards = place_terminal(batch.rewards, batch.response_cu_seqlens, batch.response_tokens)
        expected, _ = turn_gae(rewards, batch.values, turns, responses, 0.5, 1.0)
        torch.testing.assert_close(batch.advantages, expected)
    past = history.regression.past  # type: ignore[union-attr]
    assert past is not None
    reached = (past.responses > 0).nonzero().flatten().tolist()
    assert reached == [0, 1], "two turns are positions one and two"


def test_rewards_of_earlier_turns_are_not_predicted_again() -> None:
    """Paid at the third token: a constant return leaves nothing to predict behind it."""
    history = ReturnHistory(regression=RegressionConfig(prefix=False, surprise=False))
    for step in range(2):
        batch = rollout(step)
        batch.rewards = torch.ones(batch.samples)
        first = batch.response_cu_seqlens[:-1]
        batch.turn_rewards = torch.zeros(batch.response_tokens)
        batch.turn_rewards[first + 1] = 1.0
        batch, _ = estimated(batch, history)
    assert batch.values is not None
    assert batch.values[first].tolist() == pytest.approx([1.0] * batch.samples, abs=0.05)
    assert batch.values[first + 2].tolist() == pytest.approx([0.0] * batch.samples, abs=0.05)


def test_a_critics_value_is_one_more_feature() -> None:
    history = ReturnHistory(regression=RegressionConfig(surprise=False))
    for step in range(3):
        batch = rollout(step)
        batch.values = torch.repeat_interleave(batch.rewards, batch.response_lengths) * 3
        values = batch.values.clone()
        found, row = estimated(batch, history)
        assert found.values is not None and torch.equal(found.values, values), "the critic's own"
        assert found.returns is not None
    assert row[f"{names.REGRESSION_SHARE}value"] > 0.8
    assert row[names.EXPLAINED_CALIBRATED] > 0.8
