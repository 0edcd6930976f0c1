"""Settings that do not do what they seem to: cautions and refusals before a run starts."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import train_config

from vapo_megatron.checks.preflight import check_teacher, unused_settings
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput


def _config(folder: Path, **changes: Any) -> TrainConfig:
    values = train_config(folder, folder / "model")
    for section, keys in changes.items():
        values[section] = values.get(section, {}) | keys
    return TrainConfig.model_validate(values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"adapter": {"rank": 4}}}, "model.adapter is set and nothing uses it"),
        (
            {
                "rollout": {"agent": "mod:run", "episode": {"max_tokens": 8}},
                "algorithm": {"advantage": {"lambda_policy": 0.9}},
            },
            "rollout.episode.max_tokens=8 leaves no room",
        ),
        (
            {
                "rollout": {
                    "agent": "mod:run",
                    "episode": {"timeout_s": 20, "call_timeout_s": 100},
                },
                "algorithm": {"advantage": {"lambda_policy": 0.9}},
            },
            "call_timeout_s=100 is above timeout_s=20",
        ),
    ],
)
def test_a_setting_without_effect_is_said(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (line,) = unused_settings(_config(tmp_path, **changes))
    assert words in line
    assert not list(unused_settings(_config(tmp_path)))


def _distilled(folder: Path, *overrides: str) -> TrainConfig:
    data = f"data.train={folder}/t.jsonl"
    given = [data, f"model.path={folder}/model", "run.name=d", "preset=distill", *overrides]
    return load_config(TrainConfig, None, [*given, "sampling.max_new_tokens=8"], PRESETS)


def test_distillation_names_its_teacher(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"reference_path=null: the reward weighs nothing"):
        check_teacher(_distilled(tmp_path))
    check_teacher(_distilled(tmp_path, "reward.correct=1"))
    check_teacher(_distilled(tmp_path, f"algorithm.kl.reference_path={tmp_path}/teacher"))
    own = _distilled(tmp_path, f"algorithm.kl.reference_path={tmp_path}/./model")
    assert any("its own teacher" in line for line in unused_settings(own))
    other = _distilled(tmp_path, f"algorithm.kl.reference_path={tmp_path}/teacher")
    assert not list(unused_settings(other))
