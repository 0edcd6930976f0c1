"""Values by regression in the tabular stage: what they know, what they must not know, and TEMPO's
advantages."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from examples.ablation.intervals import shown
from examples.ablation.page import ROOT
from examples.ablation.tabular import price, tables
from examples.ablation.tabular.regression import seed_batches, seed_values
from examples.ablation.tabular.run import change
from examples.ablation.tabular.settings import ALL_PRICE_ROWS, REGRESSION_ROWS, STEPS, STOP
from examples.ablation.tabular.task import Rollout, sample
from examples.ablation.tabular.training import Training
from vapo_megatron.algorithms.advantages import grpo
from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.regression import RegressionConfig

SMALL = change(
    STEPS,
    [
        "steps=6",
        "prompts=20",
        "prompts_per_step=4",
        "rollouts=3",
        "pretraining=1",
        "minibatches=4",
        "step_tokens=[1, 3]",
        "slip=0.3",
    ],
)
SEED = 1  # the second of two


def start(name: str) -> tuple[Training, list[Rollout]]:
    """Training of two seeds, and three rollouts of its first policy."""
    training = Training(SMALL, ALL_PRICE_ROWS[name], [3, 4])
    logits = training.tasks.logits
    groups = training.row.groups
    rollouts = [sample(SMALL, training.tasks, logits, training.generators, groups) for _ in "123"]
    return training, rollouts


def values_after(training: Training, rollout: Rollout) -> Tensor:
    """V~ of the tokens of SEED, float32 [T], after the past that training has; it stays as it
    is."""
    twin = deepcopy(training)
    past = twin.regressions[SEED]
    tracked = twin.track(SEED, rollout) if past.config.history else None
    batch = seed_batches(rollout, twin.actor().detach())[SEED]
    return seed_values(batch, past, tracked)[0]


def after_steps(name: str, steps: int) -> tuple[Training, Rollout]:
    """Training whose regressions have seen some rollouts, and the next one."""
    training, rollouts = start(name)
    for rollout in rollouts[:steps]:
        training.regressed(rollout)
    return training, rollouts[steps]


@pytest.mark.parametrize("name", ["reinforce_regression", "vapo_regression"])
@pytest.mark.parametrize("past", [0, 2])
def test_values_leave_out_the_responses_own_return(name: str, past: int) -> None:
    training, rollout = after_steps(name, past)
    before = values_after(training, rollout)
    response = 2
    score = rollout.score.clone()
    score[SEED, response] = 1 - score[SEED, response]
    after = values_after(training, replace(rollout, score=score))
    _, _, bounds = rollout.of_seed(SEED)
    owner = to_tokens(torch.arange(len(bounds) - 1), bounds)
    affected = set(owner[before != after].tolist())
    if training.row.groups:
        group = rollout.group[SEED] == rollout.group[SEED, response]
        expected = set(group.nonzero().flatten().tolist()) - {response}
    elif past:
        expected = set()  # without groups, values after the first step are of the past alone
    else:
        expected = set(owner.tolist()) - {response}
    assert affected == expected


@pytest.mark.parametrize("name", ["reinforce_regression", "vapo_regression"])
def test_features_know_neither_their_token_nor_later_ones(name: str) -> None:
    training, rollout = after_steps(name, 2)
    before = values_after(training, rollout)
    _, tokens, bounds = rollout.of_seed(SEED)
    for response in rollout.decided[SEED, :, -1].nonzero().flatten()[:3].tolist():
        action = rollout.action.clone()
        action[SEED, response, 2] = (action[SEED, response, 2] + 1) % STOP
        logprobs = rollout.logprobs.clone()
        logprobs[SEED, response, 2] = -5.0
        other = replace(rollout, action=action, logprobs=logprobs)
        after = values_after(training, other)
        first = int(bounds[response])
        decision = int(rollout.decision_token[SEED, response, 2]) - tokens.start
        assert torch.equal(before[first : decision + 1], after[first : decision + 1])
        assert before[decision + 1] != after[decision + 1]


@pytest.mark.parametrize("name", ["reinforce_regression", "vapo_regression"])
def test_first_step_has_the_others_mean_and_no_trust(name: str) -> None:
    training, (first, second, _) = start(name)
    advantages = training.regressed(first)
    for seed in range(2):
        responses, _, _ = first.of_seed(seed)
        others = leave_one_out(first.rewards[responses], first.group[seed])
        expected = (first.rewards[responses] - others).float()[:, None]
        apart = (advantages[seed] - expected) * first.decided[seed]
        assert float(apart.abs().max()) < 1e-6
    for _ in range(5):
        training.regressed(second)
    for course in training.courses:
        trust = course.metrics["trust"]
        assert trust[:2] == [0.0, 0.0], "nothing was predicted before the second step"
        assert trust[5] > 0, "the same responses again and again"
        assert len(course.metrics["critic_explains"]) == 6


def test_seeds_have_regressions_of_their_own() -> None:
    together = Training(SMALL, ALL_PRICE_ROWS["vapo_regression"], [3, 4]).run()
    alone = Training(SMALL, ALL_PRICE_ROWS["vapo_regression"], [4]).run()
    assert together[1].accuracy == pytest.approx(alone[0].accuracy, abs=1e-6)
    for name in ("trust", "critic_explains"):
        assert together[1].metrics[name] == pytest.approx(alone[0].metrics[name], abs=1e-5)


def test_tempo_compares_siblings_with_the_same_decisions() -> None:
    training, rollouts = start("tempo")
    branches = 0
    for rollout in rollouts:
        advantages = training.without_values(rollout)
        z = grpo(rollout.rewards, rollout.group.flatten()).view(rollout.group.shape).double()
        for seed, response, step in rollout.decided.nonzero().tolist():
            group = rollout.group[seed] == rollout.group[seed, response]
            actions = rollout.action[seed]
            alike = (actions == actions[response]) & rollout.decided[seed]
            passed = group & alike[:, :step].all(1) & rollout.decided[seed, :, step]
            followed = passed & alike[:, step]
            branches += bool(passed.sum() > followed.sum())
            expected = z[seed, response] + z[seed, followed].mean() - z[seed, passed].mean()
            found = float(advantages[seed, response, step])
            assert found == pytest.approx(float(expected), abs=1e-5)
    assert branches > 60


@pytest.mark.parametrize("name", ["reinforce_regression", "vapo_regression"])
def test_rows_by_regression_are_the_presets(name: str) -> None:
    row = REGRESSION_ROWS[name]
    preset: dict[str, Any] = yaml.safe_load(
        (ROOT / "vapo_megatron/config/presets" / f"{name}.yaml").read_text()
    )
    config = RegressionConfig.model_validate(preset["critic"].get("regression", {}))
    assert set(row.features) == {feature for feature, chosen in config if chosen}
    advantage = preset["algorithm"]["advantage"]
    assert row.calibration == advantage["calibration"]
    assert row.lambda_floor == advantage["length_adaptive_floor"]
    assert row.groups == (preset.get("batch", {}).get("samples_per_prompt") != 1)


def test_one_command_compares_values_by_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(price, "choose_rate", lambda area_at: {2.0: area_at(2.0)})
    monkeypatch.setattr(price, "CHOOSING", [1000])
    small = ["steps=4", "prompts=10", "prompts_per_step=4", "rollouts=2", "pretraining=1"]
    price.main([*small, "minibatches=4"], ["steps"], None, "0-1", tmp_path / "f.json", True)
    figures = json.loads((tmp_path / "f.json").read_text())["settings"]["steps"]
    assert list(figures["tables"]) == ["tuned"], "no table shows the setting's learning rate"
    tuned = figures["tables"]["tuned"]
    assert list(tuned) == list(REGRESSION_ROWS)
    without = {"reinforce_direct", "without_critic", "tempo"}
    assert {name for name in tuned if "explains" not in tuned[name]} == without
    said = capsys.readouterr().out
    for name, row in REGRESSION_ROWS.items():
        assert said.count(f"| steps | {row.title} | {tuned[name]['area'][0]:.3f} (x2) ") == 1
    areas = {name: found["area"][0] for name, found in tuned.items()}
    less = tables.as_interval(tuned["tempo"]["less_reinforce_direct"])
    assert less is not None
    assert less.mean == pytest.approx(areas["tempo"] - areas["reinforce_direct"])
    assert f"| {shown(less)} |" in said
