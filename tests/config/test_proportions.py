"""A config that leaves the proportions of its algorithm is told of by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import write_config

from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.proportions import proportions_left
from vapo_megatron.config.train import TrainConfig

PRESETS = Path(algorithm.__file__).parent / "presets"


def load(tmp_path: Path, *overrides: str) -> TrainConfig:
    required: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "sampling": {"max_new_tokens": 8192},
    }
    return load_config(
        TrainConfig, write_config(tmp_path / "train.yaml", required), overrides, PRESETS
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_presets_keep_them_at_their_own_length(tmp_path: Path, name: str) -> None:
    assert proportions_left(load(tmp_path, f"preset={name}")) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["sampling.max_new_tokens=32"],
            "alpha=0.05: lambda is clamped to 0 for responses of 20 tokens or fewer",
        ),
        (
            ["preset=vapo_direct", "critic.kind=probe"],
            "critic.optimizer.lr=2e-06 with critic.kind=probe",
        ),
        (
            ["critic.optimizer.lr=1e-7"],
            "critic.optimizer.lr=1e-07 is below actor.optimizer.lr=1e-06",
        ),
        (["reward.incorrect=0"], "positive_nll.coef=0.1 weighs 2 times as much as at -1 and 1"),
    ],
)
def test_what_leaves_them_is_named(tmp_path: Path, overrides: list[str], told: str) -> None:
    found = proportions_left(load(tmp_path, *overrides))
    assert sum(told in line for line in found) == 1, found
    assert all("\n" not in line for line in found)


def test_the_planned_length_counts(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert proportions_left(config, 300) == [] and len(proportions_left(config, 15)) == 1
