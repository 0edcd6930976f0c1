"""An iteration of the trainer in which each group's prompt is computed once: the same metrics and
weights, on one rank and on two, which plan alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import spread
from ranks import run_ranks
from switch_rollout import config_of, read_rollout, state_of, write_models

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic, update_policy

SHARED = {"actor.share_prompts": True, "critic.share_prompts": True}
SWITCHES: dict[str, Any] = {
    "algorithm.kl.placement": "reward",
    "algorithm.kl.coef": 0.1,
    "algorithm.advantage.estimator": "gae",
}


def watch_plans(model: Trainable, plans: list[Any]) -> None:
    """Append each plan of a model: samples and whether any begin alike."""
    plan = model.plan

    def watched(*arguments: Any) -> Any:
        made = plan(*arguments)
        plans.append((model.name, list(made), arguments[-1] is not None))
        return made

    model.plan = watched  # type: ignore[method-assign]


def iteration(folder: Path, switches: dict[str, Any]) -> dict[str, Any]:
    """Collective: plans, positions of all micro-batches, which samples begin alike, metrics and
    weights."""
    config = config_of(folder, SWITCHES | switches)
    models = load_models(config, None)
    batch = spread(read_rollout(folder))
    plans: list[Any] = []
    trained = [model for model in models.trained if isinstance(model, Trainable)]
    assert models.reference is not None
    for model in (*trained, models.reference):
        watch_plans(model, plans)
    positions = {}
    for model in trained:
        part = batch.model_input(model, range(batch.samples))
        packed = model.microbatches(part.batch, part.share)
        positions[model.name] = [len(microbatch.ids) for microbatch in packed]
    numbers = batch._prompts_of_all(for_critic=False).tolist()
    first_alike = [numbers.index(number) for number in numbers]
    with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, config.algorithm, recorder)
        estimate_advantages(batch, config.algorithm, recorder)
        update_critic(models, batch, config.algorithm, "1/1", recorder)
        update_policy(models, batch, config.algorithm, "1/1", recorder)
        row = recorder.write(1)
    weights = {
        f"{model.name} {name}": tensor.numpy()
        for model in trained
        for name, tensor in state_of(model).items()
    }
    return {
        "plans": plans,
        "positions": positions,
        "first_alike": first_alike,
        "row": row,
        "weights": weights,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Metrics but for times and memory, and weights."""
    compared = 0
    for name, value in expected["row"].items():
        if name.startswith(("time/", "memory/", "perf/", "timing/")):
            continue
        assert found["row"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        compared += 1
    assert compared > 20
    for name, weight in expected["weights"].items():
        error = np.abs(found["weights"][name] - weight).max()
        assert error <= 1e-5 * np.abs(weight).max() + 1e-7, f"{name}: {error}"


def test_an_iteration_has_the_same_numbers(tmp_path: Path) -> None:
    folder = write_models(tmp_path)
    (expected,) = run_ranks(1, iteration, folder, {})
    assert not any(shares for *_, shares in expected["plans"])
    for ranks in (1, 2):
        found = run_ranks(ranks, iteration, folder, SHARED)
        assert all(report["plans"] == found[0]["plans"] for report in found)
        names = {name for name, _, shares in found[0]["plans"] if shares}
        assert names == {"actor", "critic", "reference"}
        for report in found:
            assert report["first_alike"] == expected["first_alike"]
            assert_same(report, expected)
        for name in ("actor", "critic"):
            positions = [n for report in found for n in report["positions"][name]]
            # Two of three prompts of 2 to 5 tokens, but for the last token of each
            assert sum(expected["positions"][name]) - sum(positions) == 20
            assert max(positions) <= 40
