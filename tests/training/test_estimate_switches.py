"""Advantages, value targets, what carries loss and what is reported of them under every switch,
beside the formulas of
switch_formulas: on a scored rollout, without models."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import spread
from step_formulas import responses_of
from switch_formulas import Estimates, group_advantage, importance
from switch_metrics import of_advantages, of_values
from switch_rollout import GREEDY, RESPONSES
from test_step_switches import CASES, A, S, W
from threads import on_threads
from torch import Tensor

from vapo_megatron.algorithms.registry import ESTIMATORS, call_with
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import critic_row, estimate_advantages
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.updates import correct_for_rollout

SECTIONS = ("advantage", "shaping", "kl", "filter_function")
SWITCHES = {
    case.name: case.switches
    for case in CASES
    if case.key.removeprefix("algorithm.").startswith(SECTIONS)
} | {
    "window_in_rewards": {S + "truncated": "window", A + "gamma": 0.9, A + "lambda_policy": 0.5},
    "bootstrap_adaptive": {
        S + "truncated": "bootstrap",
        A + "lambda_critic": 0.5,
        A + "gamma": 0.9,
    },
    "masked_whitened": {S + "truncated": "mask", A + "whiten": "scale", A + "estimator": "rloo"},
    "masked_raft": {
        S + "truncated": "mask",
        A + "estimator": "raft",
        "algorithm.filter_function": "switch_functions:keep",
    },
    "lambda_clamped": {A + "length_adaptive_floor": 0.7},
    "lambda_fixed": {A + "lambda_policy": 0.7, A + "length_adaptive_floor": 0.7},
}


def algorithm_of(switches: dict[str, Any]) -> AlgorithmConfig:
    tree: dict[str, Any] = {}
    for key, value in ({A + "length_adaptive_alpha": 0.3} | switches).items():
        *sections, name = key.removeprefix("algorithm.").split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        if value != "unset":
            at[name] = value
    return AlgorithmConfig.model_validate(tree)


def noise(seed: int, total: int) -> Tensor:
    return torch.randn(total, generator=torch.Generator().manual_seed(seed))


def scored(config: AlgorithmConfig) -> ExperienceBatch:
    """Responses to one prompt begin with one value, as a sound critic's do."""
    samples = []
    for group, members in enumerate(RESPONSES):
        for index, (length, reward, correct, truncated) in enumerate(members):
            reason: Any = "length" if truncated else "stop"
            prompt = Prompt(str(group), "", "", tuple(range(1 + group)))
            sample = Sample(prompt, group, index, 0, [5] * length, [0.0] * length, reason, 0, 0)  # type: ignore[arg-type]
            sample.reward = reward
            sample.correct = correct
            samples.append(sample)
    batch = from_samples(samples)
    total = batch.response_tokens
    batch.rollout_logprobs = -2 + 0.4 * noise(1, total)
    batch.old_logprobs = batch.rollout_logprobs + 0.3 * noise(2, total)
    batch.entropies = noise(3, total).abs()
    if config.uses_reference:
        batch.ref_logprobs = batch.rollout_logprobs + 0.3 * noise(4, total)
    if config.uses_critic:
        batch.values = 0.5 * noise(5, total)
        first = batch.response_cu_seqlens[:-1]
        batch.values[first] = 0.1 + 0.2 * batch.group_ids
    if config.advantage.estimator == "remax":
        batch.greedy_rewards = torch.tensor(GREEDY)[batch.group_ids]
    return batch


def estimated(
    config: AlgorithmConfig, new_critic: bool = False, batch: ExperienceBatch | None = None
) -> Any:
    """The batch with its estimates, and the row."""
    whole = spread(scored(config) if batch is None else batch)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        estimate_advantages(whole, config, recorder, new_critic)
        row = recorder.write(1)
    return whole, {name: value for name, value in row.items() if not name.startswith("memory/")}


@pytest.mark.parametrize("name", SWITCHES)
def test_estimates_are_those_of_the_formula(name: str) -> None:
    config = algorithm_of(SWITCHES[name])
    batch, row = on_threads(1, estimated, config)[0]
    own = batch.local
    lengths = batch.local.response_lengths.tolist()
    responses = responses_of(scored(config).tensors())

    def parts(x: Tensor | None) -> list[Tensor] | None:
        return None if x is None else list(x.double().split(lengths))

    old = parts(own.old_logprobs)
    values = parts(own.values)
    assert old is not None
    wanted = Estimates(responses, config, old, parts(own.ref_logprobs) or old, values)
    expected = torch.cat(wanted.advantages)
    torch.testing.assert_close(own.advantages.double(), expected, rtol=1e-4, atol=1e-5)
    assert own.selected.tolist() == batch.table.selected.tolist() == wanted.selected
    assert (
        batch.table.shaped_rewards.tolist()
        == pytest.approx(wanted.rewards)
        == own.shaped_rewards.tolist()
    )
    assert (own.returns is None) == (values is None)
    taught = torch.tensor(
        [config.shaping.truncated != "window" or not r.truncated for r in responses]
    )
    if values is not None:
        taught_tokens = taught.repeat_interleave(own.response_lengths)
        targets = torch.cat(wanted.targets)[taught_tokens]
        torch.testing.assert_close(
            own.returns.double()[taught_tokens], targets, rtol=1e-4, atol=1e-5
        )
    found: Any = SimpleNamespace(
        config=config, responses=responses, estimates=wanted, values=values, critic=values
    )
    told = of_advantages(found)
    if config.kl.placement != "reward" and values is not None:
        told |= of_values(found, row[names.BASELINE_POSITION])
    if config.filter_function is not None:
        told["filter/kept"] = sum(r.length % 2 for r in responses) / len(responses)
    assert row.pop("time/advantages") > 0
    assert {key: row[key] for key in told} == pytest.approx(
        {key: float(value) for key, value in told.items()}, rel=1e-4, abs=1e-5
    )
    assert row.keys() - told.keys() <= (
        {key for key in row if key.startswith("critic/")} if values else set()
    )


@pytest.mark.parametrize("name", ESTIMATORS.names(groups=True, per_token=False))
def test_advantages_follow_the_formula_in_any_group(name: str) -> None:
    """The rollout of switch_rollout has groups of three, where a median of others is their mean."""
    groups = [prompt for prompt, size in enumerate((2, 3, 4, 5, 8)) for _ in range(size)]
    lengths = torch.arange(len(groups)) % 7 + 1
    rewards = noise(6, len(groups))
    outcomes = {"rewards": rewards, "group_ids": torch.tensor(groups), "lengths": lengths}
    totals = rewards.tolist()
    responses: Any = [SimpleNamespace(length=length) for length in lengths.tolist()]
    expected = []
    for s, prompt in enumerate(groups):
        members = [i for i, other in enumerate(groups) if other == prompt]
        expected.append(group_advantage(name, s, members, totals, responses))
    found = call_with(ESTIMATORS.formula(name), outcomes)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double())


CORRECTED = {case.name: case.switches for case in CASES if case.key.startswith(W)}


def corrected(config: AlgorithmConfig) -> Any:
    batch = spread(scored(config))
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        correct_for_rollout(batch, config.importance_sampling, recorder)
        return batch, recorder.write(1)


@pytest.mark.parametrize("name", CORRECTED)
def test_importance_weights_follow_the_formula_and_are_reported(name: str) -> None:
    config = algorithm_of(CORRECTED[name])
    settings = config.importance_sampling
    batch, row = corrected(config)
    own = batch.local
    bounds = own.response_lengths.tolist()
    pairs = list(
        zip(
            own.old_logprobs.double().split(bounds),
            own.rollout_logprobs.double().split(bounds),
            strict=True,
        )
    )
    weights = [importance(config, old, rollout) for old, rollout in pairs]
    found = own.importance_weights
    assert found.tolist() == pytest.approx(torch.cat(weights).tolist(), rel=1e-4, abs=1e-6)
    row = {key: value for key, value in row.items() if not key.startswith("memory/")}
    if settings.kind == "none":
        assert row == {}
        return
    uncut = algorithm_of({W + "kind": "tis", W + "cap": 1e9})
    free = torch.cat([importance(uncut, *pair) for pair in pairs])
    assert row == pytest.approx(
        {
            "importance/weight_mean": float(found.mean()),
            "importance/weight_min": float(found.min()),
            "importance/ratio_max": float(free.max()),
            "importance/cut_share": float(
                (found.double() / free - 1).abs().gt(1e-4).double().mean()
            ),
        },
        rel=1e-4,
    )


def test_fully_truncated_rollout_says_nothing_about_the_critic() -> None:
    config = algorithm_of({S + "truncated": "bootstrap"})
    batch = scored(config)
    batch.truncated[:] = True
    row = estimated(config, batch=batch)[1]
    assert (
        not [name for name in row if name.startswith("critic/")] and names.SIGN_AGREEMENT not in row
    )
    assert "advantage/mean" in row


def test_a_critic_that_nothing_has_trained_may_be_constant() -> None:
    config = algorithm_of({})
    fault = f"{names.CRITIC_FAULT}constant"
    for told, new in ((True, ()), (True, (False,)), (False, (True,))):
        batch = scored(config)
        batch.values = torch.full((batch.response_tokens,), 0.25)
        whole = spread(batch)
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            estimate_advantages(whole, config, recorder, *new)
            assert (
                (fault in recorder.write(1)) == told == (fault in critic_row(whole, config, *new))
            )


def critic_of(
    values: Tensor, switches: dict[str, Any], **fields: Any
) -> tuple[ShardedBatch, AlgorithmConfig]:
    """Forty finished responses of two tokens, four to a prompt, right where their number is odd,
    with these values."""
    config = algorithm_of(switches)
    samples = []
    for number in range(40):
        prompt = Prompt(str(number // 4), "", "", (1,))
        right = number % 2 == 1
        sample = Sample(prompt, number // 4, number % 4, 0, [5, 6], [0.0, 0.0], ("stop"), 0, 0)  # type: ignore[arg-type]
        sample.reward = 1.0 if right else -1.0
        sample.correct = right
        samples.append(sample)
    batch = from_samples(samples)
    batch.values = values
    whole = spread(batch)
    whole.fill(shaped_rewards=batch.rewards, **fields)
    whole.local.advantages = torch.ones(80)
    return whole, config


def faults(batch: ShardedBatch, config: AlgorithmConfig, new_critic: bool = False) -> set[str]:
    row = critic_row(batch, config, new_critic)
    found = {
        name.removeprefix(names.CRITIC_FAULT) for name in row if name.startswith(names.CRITIC_FAULT)
    }
    assert (
        all(row[f"{names.CRITIC_FAULT}{fault}"] == 1 for fault in found)
        and names.EXPLAINED_VARIANCE in row
    )
    return found


RIGHT = torch.tensor([-1.0, 1.0]).repeat(20)


def test_faults_of_values_are_named_where_the_head_has_them() -> None:
    constant = critic_of(torch.full((80,), 0.25), {})
    assert faults(*constant) == {"constant"} and faults(*constant, new_critic=True) == set()
    for new_critic in (False, True):
        batch, config = critic_of(torch.zeros(80), {})
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            estimate_advantages(batch, config, recorder, new_critic)
            assert (f"{names.CRITIC_FAULT}constant" in recorder.write(1)) == (not new_critic)
    last = torch.stack((torch.zeros(40), RIGHT), 1).flatten()
    assert faults(*critic_of(last, {})) == set()
    assert faults(*critic_of(-last, {})) == {"sign"}
    assert faults(*critic_of(-last, {}), new_critic=True) == {"sign"}
    shifted = torch.stack((RIGHT, torch.zeros(40)), 1).flatten()
    assert faults(*critic_of(shifted, {})) == {"shift"}


@pytest.mark.parametrize("begin", ["prompt", "mask"])
def test_values_of_other_first_states_are_not_shifted(begin: str) -> None:
    """An agent's first request may differ within a group, and so may first tokens that a mask
    leaves out: the critic knows from there on how a response ends."""
    values = torch.stack((RIGHT, RIGHT), 1).flatten()
    assert faults(*critic_of(values, {})) == {"shift"}
    batch, config = critic_of(values, {})
    own = batch.local
    if begin == "mask":
        own.prompt_lengths -= 1
        own.loss_mask = torch.tensor([False, True, True]).repeat(40)
        own.observation_lengths = torch.ones(40, dtype=torch.int64)
    own.tokens[::6] = 2
    assert faults(batch, config) == set()


def test_responses_without_a_return_name_no_fault() -> None:
    last = torch.stack((torch.zeros(40), RIGHT), 1).flatten()
    cut = torch.arange(40) >= 8
    batch, config = critic_of(-last, {S + "truncated": "mask"}, truncated=cut)
    assert faults(batch, config) == set(), "eight are too few to tell"
