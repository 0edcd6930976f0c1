"""The families, by the model_type of their config.json, and how a model directory is read.

To add a family, write a module of the form that models/family.py states and list it in FAMILIES;
tests/models/families has a row for each.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vapo_megatron.config.base import nearest
from vapo_megatron.errors import BadInput
from vapo_megatron.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from vapo_megatron.models.family import Family
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.rotary import BadConfig
from vapo_megatron.models.spec import ModelSpec

_MODULES = (
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    gemma3,
    granite,
    olmo3,
    phi3,
    seed_oss,
    smollm3,
)
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
_NESTED = {family.nested: family for family in FAMILIES.values() if family.nested}
# Keys of a vision-language config.json that also hold for its language model.
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
# Model types that are another family under a different name. Exports have the family's, which
# transformers and engines read without code of the model's directory.
_ALIASES = {"kimi_k2": "deepseek_v3"}


@lru_cache
def _one_object(spec: ModelSpec) -> ModelSpec:
    """The first spec that equals this one: the caches of plan look specs up by the million, and
    comparing an object with itself is quick."""
    return spec


def read_spec(
    hf_dir: Path,
    *,
    vocab_divisible_by: int = 1,
    value_outputs: int = 1,
    converting: bool = False,
) -> ModelSpec:
    """The spec of a Hugging Face model directory (causal LM, sequence or token classification).

    converting: whether the family's quantised files are taken, too: they are dequantised as they
        are read.

    Raises:
        BadInput: the directory or its config.json is missing, a value is missing or of the wrong
            kind, the family is unknown, or the layers here do not support a feature of the model.
    """
    path = hf_dir / "config.json"
    try:
        config = language_config(read_config(hf_dir))
        family = _family(config.get("model_type"), path)
        return _one_object(
            family.spec(
                config,
                converting,
                vocab_divisible_by=vocab_divisible_by,
                value_outputs=value_outputs,
            )
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        is_missing = first["type"] == "missing" or first["input"] is None
        value = "missing" if is_missing else repr(first["input"])
        expected = first["msg"].removeprefix("Input should be ")
        raise BadInput(f"{path}: {key} is {value}, expected {expected}") from None
    except BadConfig as error:
        raise BadInput(f"{path}: {error}") from None


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a language model: of a vision-language one its text_config, with what
    stands beside that for both. Raises BadConfig where it has none."""
    family = _NESTED.get(config.get("model_type", ""))
    if family is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise BadConfig(
            f"text_config is {text!r}, expected an object with the language model's keys"
        )
    shared = {key: config[key] for key in _SHARED if key in config}
    language = shared | dict(text) | {"model_type": family.model_type}
    # transformers reads it outside alone, and writes its default, false, into a text_config.
    if config.get("tie_word_embeddings"):
        language["tie_word_embeddings"] = True
    return language


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a language model's config.json; None where it is not known here."""
    model_type = config.get("model_type", "")
    return FAMILIES.get(_ALIASES.get(model_type, model_type))


def config_alone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model without the tensors that are not trained: a vision part's, and
    indexers'. Raises BadConfig where a vision-language one has no language model."""
    language = language_config(config)
    family = family_of(language)
    if family is None or family.without_indexers is None:
        return language
    return family.without_indexers(language)


def engine_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for SGLang: of the trained part, in the form that its family says.
    Raises BadConfig where a vision-language one has no language model, or SGLang cannot represent
    it."""
    alone = config_alone(config)
    family = family_of(alone)
    return alone if family is None else family.engine_config(alone)


def engine_arguments_of(hf_dir: Path) -> dict[str, Any]:
    """Arguments of SGLang's server for the family of a model directory; none for one that is not
    known here."""
    if not (hf_dir / "config.json").is_file():  # whoever starts the engine says so
        return {}
    family = family_of(language_config(read_config(hf_dir)))
    return {} if family is None else dict(family.engine)


def _family(model_type: Any, path: Path) -> Family:
    model_type = _ALIASES.get(model_type, model_type)
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    near = nearest(str(model_type), FAMILIES) if model_type else None
    hint = f", the nearest being {near}" if near else ""
    known = ", ".join(sorted(FAMILIES))
    raise BadInput(f"{path}: model_type is {model_type!r}, expected one of {known}{hint}")
