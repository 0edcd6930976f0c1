"""Switches of different sections that contradict each other are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import write_config

from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

PRESETS = Path(algorithm.__file__).parent / "presets"
SCORES = ["reward.verifier=function", "reward.function=a.b:c", "reward.correct_above=null"]


def load(tmp_path: Path, *overrides: str) -> TrainConfig:
    required: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "sampling": {"max_new_tokens": 8192},
    }
    return load_config(TrainConfig, write_config(tmp_path / "train.yaml", required), overrides, PRESETS)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["preset=grpo", "batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (["preset=dapo", "batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (["algorithm.dynamic_sampling.enabled=true", "batch.samples_per_prompt=1"], "dynamic_sampling.enabled=true"),
        (["algorithm.advantage.lambda_policy=1.5"], "lambda_policy"),
        (["algorithm.kl.coef=0.1"], "placement=none with coef=0.1"),
        (["preset=grpo", "value_pretraining.enabled=true"], "value_pretraining.enabled=true with algorithm.advantage"),
        (["preset=grpo", "critic.freeze_attention=true"], "critic.freeze_attention=true with algorithm.advantage"),
        (
            ["preset=grpo", "critic.init=reward_model", "critic.init_path=m"],
            "critic.init=reward_model with algorithm.advantage",
        ),
        (
            ["critic.init=reward_model", "critic.init_path=m", "algorithm.value_loss.kind=hl_gauss"],
            "critic.init=reward_model with algorithm.value_loss.kind=hl_gauss",
        ),
        (["algorithm.value_loss.kind=hl_gauss", "reward.correct=2.0"], "does not hold reward.incorrect=0"),
        (SCORES, "positive_nll.positives=correct needs the verifier's grade"),
        ([*SCORES, "preset=dapo"], "dynamic_sampling.enabled=true needs the verifier's grade"),
        (["reward.correct_above=null"], "correct_above=null with verifier=math"),
    ],
)
def test_contradictions_between_sections_are_refused_by_name(tmp_path: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(BadInput) as refused:
        load(tmp_path, *overrides)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*SCORES, "algorithm.policy_loss.positive_nll.coef=0"],
        [*SCORES, "algorithm.policy_loss.positive_nll.positives=reward"],
        ["algorithm.value_loss.kind=hl_gauss", "reward.correct=2.0", "algorithm.value_loss.high=2.0"],
        ["preset=grpo", "algorithm.kl.replace_reference_every=400"],
    ],
)
def test_what_is_refused_can_be_mended(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *overrides)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_every_preset_is_a_whole_config(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, f"preset={name}")
    assert config.value_pretraining.enabled <= config.algorithm.uses_critic
