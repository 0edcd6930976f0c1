"""What a section refuses by itself, in words that name key, value and remedy."""

import re
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.base import Section, known_keys
from vapo_megatron.config.data import EvalSet, EvaluationDataConfig, PromptTemplate, ServerConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.model import ActorConfig, CriticConfig, LayoutConfig, OptimizerSettings
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import SftDataConfig
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig

TRAIN: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "t"},
    "sampling": {"max_new_tokens": 16},
}
EVALUATE: dict[str, Any] = {
    "data": {"eval": [{"name": "a", "path": "p"}]},
    "sampling": {"max_new_tokens": 16},
}
SERVER: dict[str, Any] = {"url": "http://host", "model": "m"}


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        (
            AlgorithmConfig,
            {"advantage": {"estimator": "rloo", "off_policy": "vtrace"}},
            "off_policy=vtrace with estim",
        ),
        (CriticConfig, {"init": "reward_model"}, "init=reward_model needs init_path"),
        (CriticConfig, {"init_path": "p"}, "leave init_path out, or set init"),
        (
            LayoutConfig,
            {"tp": 2, "ep": 3, "sequence_parallel": True},
            "ep=3 and tp=2: one must divide the other",
        ),
        *(
            (
                section,
                {"share_prompts": True, "layout": {"cp": 2}},
                "share_prompts with layout.cp=2: a context-parallel rank has chunks of sequences "
                "and no whole prompt, set layout.cp=1 or share_prompts=false",
            )
            for section in (ActorConfig, CriticConfig)
        ),
        (OptimizerSettings, {"decay": "cosine"}, "decay=cosine needs decay_steps"),
        (
            OptimizerSettings,
            {"warmup_steps": 10, "decay": "linear", "decay_steps": 10},
            "warmup_steps=10 is not below decay_steps=10",
        ),
        (OptimizerSettings, {"lr": 1e-6, "min_lr": 1e-5}, "min_lr=1e-05 is above lr"),
        (RolloutConfig, {"quantization": "fp8"}, "quantization=fp8 with load_format=auto"),
        (RolloutConfig, {"server_args": {"--tp": 2}}, "server_args.--tp: write it as in"),
        (PromptTemplate, {"user_template": "{problem} {problem}"}, "has {problem} 2 times"),
        (
            PromptTemplate,
            {"chat_template": False, "system_prompt": "s"},
            "system_prompt needs chat_template=true",
        ),
        (
            EvalSet,
            {"name": "a_problems", "path": "p"},
            "name=a_problems: files of evaluations end like that",
        ),
        (
            EvalSet,
            {"name": "a", "path": "p", "fields": {"problm": "q"}},
            "as data.fields: unknown key problm; did you mean problem?",
        ),
        (
            EvaluationDataConfig,
            {"eval": [{"name": "a", "path": "p"}] * 2},
            "names a, a are not all different",
        ),
        (
            SftDataConfig,
            {"path": "p", "steps": 3, "epochs": 2},
            "steps=3 with epochs=2: both say how long",
        ),
        (ServerConfig, SERVER | {"url": "https://me:word@host"}, "has a user or password"),
        (EvaluateConfig, EVALUATE, "neither is given of model"),
        (
            EvaluateConfig,
            EVALUATE | {"model": {"path": "m"}, "server": SERVER},
            "both are given of model",
        ),
        (
            EvaluateConfig,
            EVALUATE | {"server": SERVER | {"api": "completions"}},
            "server.api=completions with data",
        ),
        (
            EvaluateConfig,
            EVALUATE | {"model": {"path": "m"}, "rollout": {"load_format": "dummy"}},
            "leaves the engines",
        ),
        (
            EvaluateConfig,
            EVALUATE | {"model": {"path": "m"}, "rollout": {"external_urls": ["http://h:1"]}},
            "those engines have a trainer's weights",
        ),
        (
            TrainConfig,
            TRAIN | {"checkpoint": {"keep": {"best": "evaluation/a_avg@8"}}},
            "is not a metric of data.eval",
        ),
        (
            TrainConfig,
            TRAIN | {"checkpoint": {"keep": {"best": "time/step"}}},
            "is not a metric of a step",
        ),
        (TinyModel, {"heads": 3, "kv_heads": 2}, "heads 3 is not a multiple of kv_heads 2"),
        (
            TinyModel,
            {"family": "qwen2", "head_dim": 16},
            "a qwen2 model has head_dim = hidden_size / heads",
        ),
        (TinyModel, {"experts_per_token": 9}, "experts_per_token 9 is above the 8 experts"),
    ],
)
def test_a_section_refuses_what_cannot_be(
    section: type[Section], values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        section.model_validate(values)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "section", [section for section in Section.__subclasses__() if section.CONFLICTS]
)
def test_every_conflict_is_between_keys_that_there_are(section: type[Section]) -> None:
    """A misspelt key would stop every run, a misspelt value none."""
    keys = known_keys(section)
    for conflict in section.CONFLICTS:
        for condition in re.split(", | & ", f"{conflict[0]}, {conflict[1]}".strip(", ")):
            key, _, values = re.sub("[!>]", "", condition).partition("=")
            assert re.split("[=>]", condition.replace("!", ""))[0] in keys
            assert not re.search("[a-z]", values) or all(
                value in _choices(section, key) for value in values.split("|")
            )


def _choices(section: type[Section], key: str) -> set[str]:
    head, _, rest = key.partition(".")
    annotation = section.model_fields[head].annotation
    if rest:
        (inner,) = [
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, Section)
        ]
        return _choices(inner, rest)
    return {
        "null",
        "true",
        "false",
        *(
            str(choice)
            for part in (annotation, *get_args(annotation))
            for choice in get_args(part) or [part]
        ),
    }
