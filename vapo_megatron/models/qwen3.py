"""Qwen3, dense: norms on queries and keys, no biases, an explicit head size."""

from typing import ClassVar

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """Qwen3's."""

    bounded_by_window: ClassVar[bool | None] = None

    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    attention = config.self_attention(qk_norm="head")
    layer = decoder_layer(config.hidden_size, attention, GatedMlp(config.intermediate_size))
    return config.num_hidden_layers * (layer,)


FAMILY = Family("qwen3", "Qwen3", Config, layers)
