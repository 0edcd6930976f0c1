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


CLAMPED = (
    "algorithm.advantage.length_adaptive_alpha={alpha}: lambda is clamped to {floor} for responses "
    "of {clamped} tokens or fewer, and most are planned to be about {length} (at most {most}): a "
    "later token tells nothing of an earlier one"
)
SLOW = (
    "critic.optimizer.lr=9e-07 is below actor.optimizer.lr=1e-06: VAPO's critic learns twice as "
    "fast as its actor (2e-06); a slower one lags behind the policy that it judges"
)
PROBE = (
    "critic.optimizer.lr={lr} with critic.kind=probe: it is the learning rate of a model, a new "
    "head wants about 0.001"
)
SPREAD = (
    "reward.incorrect={low} and reward.correct=1: advantages scale with their distance, "
    "policy_loss.positive_nll.coef=0.1 weighs {times} times as much as at -1 and 1: use those "
    "rewards, or scale it"
)
NO_NLL = "algorithm.policy_loss.positive_nll.coef=0"
IS_PROBE = ["preset=vapo_direct", "critic.kind=probe"]
FUNCTION = ["reward.verifier=function", "reward.function=a:b"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["sampling.max_new_tokens=40"],
            [CLAMPED.format(alpha=0.05, floor=0, clamped=20, length=20, most=40)],
        ),
        (["sampling.max_new_tokens=42"], []),
        (
            [
                "sampling.max_new_tokens=16",
                "algorithm.advantage={length_adaptive_alpha: 0.1, length_adaptive_floor: 0.5}",
            ],
            [CLAMPED.format(alpha=0.1, floor=0.5, clamped=10, length=8, most=16)],
        ),
        (
            [
                "sampling.max_new_tokens=16",
                "algorithm.advantage={lambda_policy: 0.9, lambda_critic: length_adaptive}",
            ],
            [CLAMPED.format(alpha=0.05, floor=0, clamped=20, length=8, most=16)],
        ),
        (["sampling.max_new_tokens=16", "algorithm.advantage.lambda_policy=0.9"], []),
        (["sampling.max_new_tokens=16", "preset=sao"], []),
        (["sampling.max_new_tokens=16", "preset=grpo"], []),
        (["critic.optimizer.lr=9e-7"], [SLOW]),
        (["critic.optimizer.lr=1e-6"], []),
        (["critic.optimizer.lr=9e-7", "preset=grpo"], []),
        ([*IS_PROBE, "critic.optimizer.lr=9e-5"], [PROBE.format(lr="9e-05")]),
        ([*IS_PROBE, "critic.optimizer.lr=1e-4"], []),
        (["reward.incorrect=0"], [SPREAD.format(low=0, times=2)]),
        (["reward.incorrect=-4"], [SPREAD.format(low=-4, times=0.4)]),
        (["reward={correct: 3, incorrect: 1}"], []),
        (["reward={correct: 4, incorrect: 1}", NO_NLL], []),
        (["reward.incorrect=0", "preset=grpo"], []),
        (["reward.incorrect=0", *FUNCTION], []),
        (
            ["reward.incorrect=1"],
            ["reward.incorrect equals reward.correct: nothing can be learnt"],
        ),
    ],
)
def test_a_departure_is_told_with_its_numbers(
    tmp_path: Path, overrides: list[str], told: list[str]
) -> None:
    assert proportions_left(load(tmp_path, *overrides)) == told


def test_the_planned_length_counts(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert proportions_left(config, 300) == [] and len(proportions_left(config, 15)) == 1
