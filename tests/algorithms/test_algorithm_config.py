"""The switches: VAPO by default, presets that validate, contradictions refused by name."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import ValidationError

from vapo_megatron.algorithms import importance, kl
from vapo_megatron.algorithms.registry import ESTIMATORS
from vapo_megatron.config import algorithm as config
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.value import ValuePretrainingConfig
from vapo_megatron.training.credit import policy_lambda

PRESETS = Path(config.__file__).parent / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
SECTIONS = {"algorithm", "value_pretraining", "rollout", "reward", "batch", "actor", "critic"}


def read(name: str) -> dict[str, Any]:
    root = OmegaConf.merge(
        {"sampling": {"max_new_tokens": 20480}}, OmegaConf.load(PRESETS / f"{name}.yaml")
    )
    values = OmegaConf.to_container(root, resolve=True)
    assert isinstance(values, dict)
    del values["sampling"]
    return values


def load(name: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(read(name).get("algorithm", {}))


def test_all_presets_are_there() -> None:
    family = {
        "vapo",
        "vc_ppo",
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
    }
    assert family | {"remax", "raft", "gspo", "cispo"} <= set(NAMES)
    assert sum(name.startswith("vapo_without_") for name in NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_preset_validates(name: str) -> None:
    values = read(name)
    assert set(values) <= SECTIONS
    algorithm = load(name)
    pretraining = ValuePretrainingConfig.model_validate(values.get("value_pretraining", {}))
    assert algorithm.uses_critic or not (pretraining.enabled or "critic" in values)


def test_the_vapo_preset_is_the_defaults() -> None:
    values = read("vapo")
    assert load("vapo") == AlgorithmConfig(update={"minibatch_size": 512})
    assert AlgorithmConfig().update.size(8192, 512) == 512
    assert (
        ValuePretrainingConfig.model_validate(values["value_pretraining"])
        == ValuePretrainingConfig()
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("vapo_without_")])
def test_an_ablation_changes_one_switch(name: str) -> None:
    def leaves(values: Any) -> int:
        return sum(map(leaves, values.values())) if isinstance(values, dict) else 1

    values = read(name)
    assert leaves(values) == (2 if name.endswith(("group_sampling", "critic")) else 1)
    changed = load(name), ValuePretrainingConfig.model_validate(values.get("value_pretraining", {}))
    assert "batch" in values or changed != (AlgorithmConfig(), ValuePretrainingConfig())


def test_presets_say_what_the_papers_say() -> None:
    assert (load("ppo").advantage.lambda_critic, load("ppo").advantage.lambda_policy) == (
        0.95,
        0.95,
    )
    assert (load("vc_ppo").advantage.lambda_critic, load("vc_ppo").advantage.lambda_policy) == (
        1.0,
        0.95,
    )
    assert load("dapo").dynamic_sampling.enabled and load("dapo").policy_loss.clip_high == 0.28
    assert load("dr_grpo").policy_loss.constant == 20480
    assert load("grpo").policy_loss.aggregation == "sequence_mean"
    assert (load("sao").policy_loss.clip_low, load("sao").policy_loss.clip_high) == (0.3, 5.0)
    with_critic = (
        "vapo",
        "ppo",
        "vc_ppo",
        "sao",
        "bpco",
        "t_ppo",
        "tether",
        "reinforce_regression",
    )
    assert not any(load(name).uses_critic for name in NAMES if not name.startswith(with_critic))


@pytest.mark.parametrize("name", ["reinforce_regression", "vapo_regression"])
def test_values_by_regression_bootstrap_nothing(name: str) -> None:
    lengths = torch.tensor([1, 50, 5000, 100_000])
    assert policy_lambda(lengths, load(name).advantage).tolist() == [1.0] * 4


def test_every_choice_has_its_function() -> None:
    for name in get_args(config.KlConfig.model_fields["estimator"].annotation):
        assert callable(getattr(kl, name))
    for name in get_args(config.ImportanceSamplingConfig.model_fields["kind"].annotation):
        assert name == "none" or callable(getattr(importance, name))


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"advantage": {"lambda_policy": 1.2}}, "lambda_policy"),
        ({"advantage": {"lambda_critic": -0.1}}, "lambda_critic"),
        ({"advantage": {"gamma": 1.1}}, "gamma"),
        ({"advantage": {"length_adaptive_alpha": 0}}, "length_adaptive_alpha"),
        ({"advantage": {"estimator": "reinforce"}}, "estimator"),
        ({"policy_loss": {"aggregation": "constant"}}, "aggregation=constant with constant=null"),
        ({"policy_loss": {"constant": 3.0}}, "aggregation=token_mean with constant=3"),
        ({"policy_loss": {"dual_clip": 1.1}}, "dual_clip=1.1 is not above"),
        ({"policy_loss": {"dual_clip": 3.0, "kind": "cispo"}}, "dual_clip=3 with kind=cispo"),
        ({"policy_loss": {"kind": "gspo"}}, "kind=gspo with aggregation=token_mean"),
        ({"value_loss": {"low": 1.0, "high": 0.0}}, "low=1.0 is not below high=0.0"),
        ({"kl": {"coef": 0.1}}, "placement=none with coef=0.1"),
        ({"kl": {"placement": "loss"}}, "placement=loss with coef=0"),
        ({"kl": {"placement": "loss", "coef": 0.1}}, "placement=loss with estimator=k1"),
        (
            {"kl": {"placement": "reward", "coef": 0.1, "estimator": "k3"}},
            "placement=reward with estimator=k3",
        ),
        ({"importance_sampling": {"low": 1.5}}, "does not hold 1"),
        ({"shaping": {"soft_overlong": {"max_length": 10, "cache_length": 20}}}, "cache_length=20"),
        (
            {"shaping": {"truncated": "bootstrap"}, "advantage": {"estimator": "grpo"}},
            "truncated=bootstrap with advantage.estimator=grpo: it needs a critic",
        ),
        ({"policy_loss": {"kind": "sao"}, "importance_sampling": {"kind": "tis"}}, "kind=sao"),
        ({"policy_loss": {"kind": "dppo"}, "importance_sampling": {"kind": "mis"}}, "kind=dppo"),
        (
            {"advantage": {"calibration": "trust", "estimator": "grpo"}},
            "calibration=trust with estimator=grpo",
        ),
        (
            {"advantage": {"calibration": "values", "gamma": 0.9}},
            "calibration=values with gamma=0.9",
        ),
        (
            {"advantage": {"calibration": "trust", "off_policy": "vtrace"}},
            "calibration=trust with off_policy=vtrace",
        ),
        (
            {"advantage": {"calibration": "trust", "function": "a.b:c"}},
            "calibration=trust with function=a.b:c",
        ),
        (
            {"advantage": {"calibration": "trust"}, "shaping": {"truncated": "bootstrap"}},
            "truncated=bootstrap with adv",
        ),
        (
            {"advantage": {"calibration": "trust"}, "kl": {"placement": "reward", "coef": 0.1}},
            "kl.placement=reward wi",
        ),
        (
            {"shaping": {"truncated": "window"}, "advantage": {"lambda_critic": 0.9}},
            "lambda_critic=0.9 with shaping",
        ),
        (
            {"shaping": {"truncated": "window"}, "advantage": {"off_policy": "vtrace"}},
            "off_policy=vtrace with shaping",
        ),
        (
            {"shaping": {"truncated": "window"}, "advantage": {"estimator": "rloo"}},
            "truncated=window with advantage.estimator=rloo",
        ),
        ({"kl": {"replace_reference_every": 5}}, "replace_reference_every=5 with placement=none"),
        ({"advantage": {"estimator": "function"}}, "estimator=function with function=null"),
        (
            {"advantage": {"estimator": "grpo", "function": "a.b:c"}},
            "function=a.b:c with estimator=grpo",
        ),
        ({"advantage": {"estimator": "function", "function": "no colon"}}, "function"),
        ({"filter_function": "no colon"}, "filter_function"),
        ({"advantage": {"estimator": "grpo", "gamma": 0.9}}, "gamma=0.9 with estimator=grpo"),
        ({"advantage": {"estimator": "raft", "whiten": "full"}}, "whiten=full with estimator=raft"),
        (
            {"advantage": {"estimator": "grpo"}, "value_loss": {"kind": "hl_gauss"}},
            "value_loss.kind=hl_gauss with advantage.estimator=grpo",
        ),
        (
            {"advantage": {"estimator": "grpo"}, "update": {"critic_updates_per_policy_update": 2}},
            "update.critic_updates_per_policy_update=2 with advantage.estimator=grpo",
        ),
        ({"clip_hihg": 0.3}, "clip_hihg"),
    ],
)
def test_contradictions_are_refused_by_name(section: dict, named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate(section)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "section",
    [
        *({"advantage": {"estimator": name}} for name in ESTIMATORS.names(groups=True)),
        {"dynamic_sampling": {"max_rounds": 10}},
    ],
)
def test_one_sample_a_prompt_is_no_group(section: dict) -> None:
    train(section, samples_per_prompt=2)
    with pytest.raises(ValidationError, match=r"with batch.samples_per_prompt=1") as refused:
        train(section, samples_per_prompt=1)
    assert next(iter(next(iter(section.values())))) in str(refused.value)


def test_algorithms_without_groups_take_one_sample() -> None:
    for estimator in ("gae", "reinforce_pp", "remax"):
        train({"advantage": {"estimator": estimator}}, samples_per_prompt=1)


def train(section: dict, samples_per_prompt: int) -> TrainConfig:
    required = {"model": {"path": "m"}, "data": {"train": "t"}, "sampling": {"max_new_tokens": 16}}
    rest = {
        "value_pretraining": {"enabled": False},
        "batch": {"samples_per_prompt": samples_per_prompt},
    }
    return TrainConfig.model_validate(required | rest | {"algorithm": section})
