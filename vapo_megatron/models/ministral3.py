"""Ministral 3, text: Llama's layers with YaRN and queries that grow with their position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, refuse_unless
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer
from vapo_megatron.models.rotary import PositionScale, rope_parameters

# The rotary embedding of a file that has none.
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Config(DecoderConfig):
    """Ministral 3's."""

    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    rms_norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _complete_rotary_embedding(self) -> "Config":
        if not self.raw.get("rope_parameters") and not self.raw.get("rope_scaling"):
            self.raw["rope_parameters"] = _YARN
        return self


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    attention = config.self_attention(window=config.sliding_window)
    assert attention.rotary is not None
    rotary = replace(attention.rotary, query_scale=_query_scale(config))
    layer = decoder_layer(
        config.hidden_size,
        replace(attention, rotary=rotary),
        GatedMlp(config.intermediate_size),
    )
    return config.num_hidden_layers * (layer,)


def _query_scale(config: Config) -> PositionScale | None:
    """None where the rotary embedding's keys have no factor of it."""
    parameters = rope_parameters(config.raw)
    if parameters.get("llama_4_scaling_beta") is None:
        return None

    def positive(key: str) -> float:
        value: Any = parameters.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        refuse_unless(is_number and value > 0, f"rope_parameters.{key}", value, "a number above 0")
        return float(value)

    context = int(positive("original_max_position_embeddings"))
    return PositionScale(positive("llama_4_scaling_beta"), context)


def tiny(shape: TinyModel) -> dict[str, Any]:
    """With a context that a short text leaves; SGLang reads it beside the others."""
    context = {"original_max_position_embeddings": 16}
    return {"head_dim": shape.head_dim, "rope_parameters": {**_YARN, **context}, **context}


FAMILY = Family("ministral3", "Ministral3", Config, layers, tiny=tiny)
