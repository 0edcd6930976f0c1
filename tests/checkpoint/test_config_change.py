"""A run resumes only with a config that means the same training."""

from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.checkpoint.resume import check_config_change, differences
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

BASE: dict[str, Any] = {
    "model": {"path": "models/a"},
    "data": {"train": "train.jsonl"},
    "sampling": {"max_new_tokens": 16},
}


def config(changes: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {key: BASE.get(key, {}) | changes.get(key, {}) for key in {**BASE, **changes}}
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dump_config(config({}), tmp_path / "config.yaml")
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run": {"steps": 500, "resume": "auto", "overwrite": True}},
        {
            "actor": {
                "layout": {"tp": 4},
                "max_tokens_per_microbatch": 1000,
                "share_prompts": True,
            },
            "cluster": {"ranks": 8},
        },
        {"evaluation": {"every": 3}, "export": {"every": 5}, "monitoring": {"tensorboard": False}},
        {"checkpoint": {"every": 1, "keep": {"last": 5}}, "rollout": {"num_engines": 2}},
    ],
)
def test_how_far_where_and_how_visibly_a_run_goes_may_change(
    checkpoint: Path, changes: dict[str, Any]
) -> None:
    check_config_change(config(changes), checkpoint, ())


@pytest.mark.parametrize(
    "changes,key",
    [
        ({"run": {"seed": 2}}, "run.seed=2"),
        ({"model": {"path": "models/b"}}, "model.path=models/b"),
        ({"model": {"dtype": "float32"}}, "model.dtype=float32"),
        ({"data": {"train": "other.jsonl"}}, "data.train=other.jsonl"),
        ({"batch": {"samples_per_prompt": 8}}, "batch.samples_per_prompt=8"),
        ({"actor": {"optimizer": {"lr": 1e-5}}}, "actor.optimizer.lr=1e-05"),
        ({"algorithm": {"policy_loss": {"clip_high": 0.2}}}, "algorithm.policy_loss.clip_high=0.2"),
        ({"rollout": {"deterministic": False}}, "rollout.deterministic=False"),
    ],
)
def test_what_a_run_learns_from_may_not_unless_it_is_meant(
    checkpoint: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(BadInput) as raised:
        check_config_change(config(changes), checkpoint, ())
    assert str(raised.value).startswith(key) and str(checkpoint) in str(raised.value)
    name = key.partition("=")[0]
    assert f"run.allow_config_change=[{name}]" in str(raised.value)
    check_config_change(config(changes), checkpoint, (name,))
    check_config_change(config(changes), checkpoint, (name.rpartition(".")[0],))
    with pytest.raises(BadInput):
        check_config_change(config(changes), checkpoint, (name[:-1],))


def test_differences_are_told_by_their_dotted_keys() -> None:
    old = {"a": {"b": 1, "c": [1]}, "d": None}
    new = {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}, "f": 0}
    assert list(differences(old, new)) == [
        ("a.c", [1], [1, 2]),
        ("d", None, {"e": 1}),
        ("f", None, 0),
    ]
