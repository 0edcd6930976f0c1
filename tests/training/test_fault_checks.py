"""Faults of a critic's update that its first step on a rollout gives away, planted in the trainer's
own step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from batches import spread
from ranks import one_rank_in_process, run_ranks
from switch_rollout import config_of, models_of_this_process, read_rollout, write_models

from vapo_megatron.algorithms.critic_faults import FAULTS
from vapo_megatron.algorithms.segments import last_tokens
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training import updates
from vapo_megatron.training.advantages import estimate_advantages, gae
from vapo_megatron.training.losses import ValueLoss
from vapo_megatron.training.models import Models, load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.shards import ModelInput, ShardedBatch
from vapo_megatron.training.token_rewards import token_rewards
from vapo_megatron.training.updates import _tolerance, update_critic

Plant = Callable[[ShardedBatch, AlgorithmConfig, Models], None]


def nothing(batch: ShardedBatch, config: AlgorithmConfig, models: Models) -> None:
    """A sound critic."""


def targets_apart(by: float, share: float = 0.0) -> Plant:
    """One target is not what the values give, by so much and by a share of the largest value."""

    def plant(batch: ShardedBatch, config: AlgorithmConfig, models: Models) -> None:
        assert batch.local.returns is not None and batch.local.values is not None
        batch.local.returns[3] += by + share * float(batch.local.values.abs().max())

    return plant


def values_apart(share: float) -> Plant:
    """Targets follow from the values, which are not the critic's: by a share of the largest, or of
    1."""

    def plant(batch: ShardedBatch, config: AlgorithmConfig, models: Models) -> None:
        assert batch.local.values is not None
        batch.local.values[3] += share * max(1.0, float(batch.local.values.abs().max()))
        gae(batch.local, token_rewards(batch.local, config), config, batch.local.response_lengths)

    return plant


def frozen(batch: ShardedBatch, config: AlgorithmConfig, models: Models) -> None:
    assert models.critic is not None
    models.critic.head_has_gradient = lambda: False  # type: ignore[method-assign]


def learnt(batch: ShardedBatch, config: AlgorithmConfig, models: Models) -> None:
    """Values are their targets already, so that there is no gradient."""
    frozen(batch, config, models)
    batch.local.returns = batch.local.values


def same(part: ModelInput, loss: ValueLoss) -> ValueLoss:
    return loss


def without_ends(part: ModelInput, loss: ValueLoss) -> ValueLoss:
    weights = loss.weights.clone()
    weights[last_tokens(part.batch.response_cu_seqlens)[1]] = 0
    return replace(loss, weights=weights)


def inverted(part: ModelInput, loss: ValueLoss) -> ValueLoss:
    return replace(loss, weights=(loss.weights == 0).float())


def found_in(folder: Path, name: str) -> set[str]:
    """On one rank: the faults that are recorded."""
    switches, plant, change, _ = CASES[name]
    config = config_of(folder, switches)
    models = load_models(config, None)
    batch = spread(read_rollout(folder))
    if name == "sound_with_turns":
        batch.local.turn_rewards = torch.zeros(batch.response_tokens)
        batch.local.turn_rewards[batch.local.response_cu_seqlens[:-1]] = 0.5
    made = 0
    loss_of = updates.value_loss_of

    def planted(part: ModelInput, *args: Any) -> ValueLoss:
        nonlocal made
        made += 1
        loss: ValueLoss = loss_of(part, *args)
        return change(part, loss) if (made == 1) == (name != "later") else loss

    with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, config.algorithm, recorder)
        estimate_advantages(batch, config.algorithm, recorder)
        recorder.write(1)
        plant(batch, config.algorithm, models)
        with patch.object(updates, "value_loss_of", planted):
            update_critic(models, batch, config.algorithm, "1/1", recorder)
        row = recorder.write(2)
    faults = {
        name.removeprefix(names.CRITIC_FAULT) for name in row if name.startswith(names.CRITIC_FAULT)
    }
    assert (
        all(row[f"{names.CRITIC_FAULT}{fault}"] == 1 for fault in faults)
        and faults <= FAULTS.keys()
    )
    return faults


WINDOW = {"algorithm.shaping.truncated": "window"}
LARGE = {"critic.head_init_std": 300.0}
HISTOGRAM = {"algorithm.value_loss.kind": "hl_gauss"}
KL = {"algorithm.kl.placement": "reward", "algorithm.kl.coef": 0.1}
Change = Callable[[ModelInput, ValueLoss], ValueLoss]
# Switches, what is planted, a change of the loss of the first mini-batch or, where it comes later,
# of the others, and the faults that are told.
CASES: dict[str, tuple[dict[str, Any], Plant, Change, set[str]]] = {
    "sound": ({}, nothing, same, set()),
    "sound_window": (WINDOW, nothing, same, set()),
    "sound_large": (LARGE, nothing, same, set()),
    "sound_histogram": (HISTOGRAM, nothing, same, set()),
    "sound_with_kl": (KL, nothing, same, set()),
    "sound_with_turns": ({}, nothing, same, set()),
    "targets": ({}, targets_apart(0.01), same, {"targets"}),
    "targets_below": ({}, targets_apart(-0.01), same, {"targets"}),
    "targets_rounded": ({}, targets_apart(2e-4), same, set()),
    "targets_large": (LARGE, targets_apart(0.0, 1e-4), same, {"targets"}),
    "targets_large_rounded": (LARGE, targets_apart(1e-3, 1e-6), same, set()),
    "targets_of_histogram": (HISTOGRAM, targets_apart(0.01), same, {"targets"}),
    "values": ({}, values_apart(0.01), same, {"targets"}),
    "values_rounded": ({}, values_apart(3e-4), same, set()),
    "values_large": (LARGE, values_apart(3e-3), same, {"targets"}),
    "values_large_rounded": (LARGE, values_apart(3e-4), same, set()),
    "end": ({}, nothing, without_ends, {"end"}),
    "mask": (WINDOW, nothing, inverted, {"mask"}),
    "frozen": ({}, frozen, same, {"frozen"}),
    "later": ({}, nothing, inverted, set()),
    "learnt": ({"algorithm.update.minibatch_size": 12}, learnt, same, {"targets"}),
}


def found_in_all(folder: Path) -> dict[str, set[str]]:
    return {name: found_in(folder, name) for name in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    if one_rank_in_process():
        return {}  # each test runs its own: what it reaches is then known
    faults: dict[str, set[str]] = run_ranks(
        1, found_in_all, write_models(tmp_path_factory.mktemp("faults"))
    )[0]
    return faults


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_and_a_sound_critic_has_none(
    found: dict[str, set[str]], name: str
) -> None:
    if one_rank_in_process():
        found |= {name: run_ranks(1, found_in, models_of_this_process(), name)[0]}
    assert found[name] == CASES[name][3]


# At the ends of responses, in their middle and nowhere
ON_RANKS = ("sound", "targets", "values", "end", "mask")


def found_on_ranks(folder: Path, layout: dict[str, Any]) -> dict[str, set[str]]:
    faults = {}
    for name in ON_RANKS:
        switches, *plants = CASES[name]
        settings = switches | {"critic.layout": layout, "critic.offload": "never"}
        with patch.dict(CASES, {name: (settings, *plants)}):
            faults[name] = found_in(folder, name)
    return faults


@pytest.mark.parametrize(
    "layout", [pytest.param({}, marks=pytest.mark.full), {"cp": 2}], ids=["dp2", "cp2"]
)
def test_several_ranks_find_the_same_faults(tmp_path: Path, layout: dict[str, Any]) -> None:
    for faults in run_ranks(2, found_on_ranks, write_models(tmp_path), layout):
        assert faults == {name: CASES[name][3] for name in ON_RANKS}


@pytest.mark.parametrize(
    ("dtype", "fp8", "share"),
    [(torch.float32, "none", 1e-3), (torch.bfloat16, "none", 0.1), (torch.bfloat16, "hybrid", 0.2)],
)
def test_coarser_numbers_may_be_further_apart(dtype: torch.dtype, fp8: str, share: float) -> None:
    critic: Any = SimpleNamespace(
        dtype=dtype, config=SimpleNamespace(precision=SimpleNamespace(fp8=fp8))
    )
    for largest, size in ((0.3, 1), (1.0, 1), (40.0, 40)):
        assert _tolerance(critic, largest) == pytest.approx(share * size)
