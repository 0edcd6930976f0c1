"""The reference policy that is replaced now and then, and values outside of a step, on real
models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread
from ranks import one_rank_in_process, run_ranks
from switch_rollout import (
    Watched,
    config_of,
    models_of_this_process,
    read_rollout,
    state_of,
    take_weights,
    write_models,
)

from vapo_megatron.training.models import load_models, replace_reference
from vapo_megatron.training.score import score, values

V = "algorithm.value_loss."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        models_of_this_process()
        if one_rank_in_process()
        else write_models(tmp_path_factory.mktemp("values"))
    )


def scored_whole(folder: Path, switches: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Values that a step scores, those of a batch that every rank has whole, and how many responses
    it said it did."""
    config = config_of(folder, switches)
    models = load_models(config, None)
    batch = spread(read_rollout(folder))
    assert models.critic is not None and batch.local.values is None
    with Watched(folder) as recorder:
        score(models, batch, config.algorithm, recorder)
    steps: list[int] = []
    found = values(models.critic, batch.local, config.algorithm.value_loss, steps.append)
    assert batch.local.values is not None
    return found.tolist(), batch.local.values.tolist(), sum(steps)


@pytest.mark.parametrize("switches", [{V + "kind": "hl_gauss", V + "bins": 21}], ids=str)
def test_values_are_scored_alike_where_every_rank_has_the_batch(
    folder: Path, switches: dict[str, Any]
) -> None:
    found, expected, done = run_ranks(1, scored_whole, folder, switches)[0]
    assert found == pytest.approx(expected, abs=1e-6) and len(found) == 118 and done == 12


def replaced(folder: Path, kl: dict[str, Any]) -> list[bool]:
    """After which of four steps the reference is the policy, whose weights are others."""
    config = config_of(folder, {f"algorithm.kl.{key}": value for key, value in kl.items()})
    models = load_models(config, None)
    if models.reference is None:
        replace_reference(models, config.algorithm.kl, 1)
        return []
    take_weights(models, folder)
    old = load_models(config_of(folder, {"model.path": str(folder / "reference")}), None).actor
    found = []
    for step in range(1, 5):
        replace_reference(models, config.algorithm.kl, step)
        wanted = state_of(models.actor)
        same = {
            torch.equal(tensor, wanted[name]) for name, tensor in state_of(models.reference).items()
        }
        assert len(same) == 1
        found += same
        models.reference.copy_from(old)
    return found


K3 = {"placement": "loss", "estimator": "k3", "coef": 0.1}


@pytest.mark.parametrize(
    ("kl", "steps"),
    [
        (K3 | {"replace_reference_every": 1}, [True] * 4),
        (K3 | {"replace_reference_every": 2}, [False, True, False, True]),
        (K3, [False] * 4),
        ({}, []),
    ],
)
def test_the_policy_of_every_nth_step_is_the_reference(
    folder: Path, kl: dict[str, Any], steps: list[bool]
) -> None:
    assert run_ranks(1, replaced, folder, kl)[0] == steps
