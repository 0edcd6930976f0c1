"""Faults planted into the trainer's own update of the critic are named in the row of the step; a
sound one has none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread
from ranks import run_ranks
from switch_rollout import config_of, read_rollout, write_models

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training import updates
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score, values


def faults(folder: Path, fault: str, switches: dict[str, Any]) -> list[str]:
    """On one rank: one iteration with a fault planted; the faults that its row names."""
    config = config_of(folder, switches)
    models = load_models(config, None)
    rollout = read_rollout(folder)
    algorithm = config.algorithm
    rollout.greedy_rewards = None
    original = updates.token_weights
    new = models.critic_is_new
    batch = spread(rollout)
    critic = models.critic
    assert critic is not None
    with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, algorithm, recorder)
        estimate_advantages(batch, algorithm, recorder, new)
        if fault == "mask":
            updates.token_weights = lambda lengths, kind, **more: (
                original(lengths, kind, **more) == 0
            ).float()  # type: ignore[assignment]
        elif fault == "end":
            to_tokens = updates.to_tokens

            def without_end(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
                found = to_tokens(x, bounds).clone()
                found[bounds[1:] - 1] = 0
                return found

            updates.to_tokens = without_end
        elif fault == "frozen":
            critic.chunks[0].output_layer.requires_grad_(False)
        elif fault == "targets":
            updates.update_critic(models, batch, algorithm, "1/0", recorder)
            recorder.write(0)
        elif fault == "targets remade":
            for parameter in critic.chunks[0].parameters():
                parameter.data.add_(0.02)
            batch.local.values = values(critic, batch.local, algorithm.value_loss)
        updates.update_critic(models, batch, algorithm, "1/1", recorder)
        row = recorder.write(1)
    return sorted(name.rpartition("fault_")[2] for name in row if "fault_" in name)


NOTHING: dict[str, Any] = {}
LAMBDA = {"algorithm.advantage.lambda_critic": 0.9}


@pytest.mark.parametrize(
    ("fault", "switches", "named"),
    [
        ("none", NOTHING, []),
        ("none", LAMBDA, []),
        ("none", {"algorithm.value_loss.kind": "hl_gauss", "algorithm.value_loss.bins": 21}, []),
        ("none", {"critic.head_init_std": 0.0}, []),
        ("mask", {"algorithm.shaping.truncated": "mask"}, ["mask"]),
        ("end", NOTHING, ["end"]),
        ("frozen", NOTHING, ["frozen"]),
        ("targets", NOTHING, ["targets"]),
        ("targets remade", LAMBDA, ["targets"]),
    ],
)
def test_a_planted_fault_is_named(
    tmp_path: Path, fault: str, switches: dict[str, Any], named: list[str]
) -> None:
    write_models(tmp_path)
    assert run_ranks(1, faults, tmp_path, fault, switches)[0] == named
