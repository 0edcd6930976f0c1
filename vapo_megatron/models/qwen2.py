"""Qwen2 and Qwen2.5: biases on query, key and value."""

from typing import ClassVar

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """Its biases are always there: attention_bias, which some files have, says nothing."""

    bounded_by_window: ClassVar[bool | None] = None

    num_key_value_heads: PositiveInt | None = 32
    attention_bias: bool = True


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    attention = config.self_attention(qkv_bias=True)
    layer = decoder_layer(config.hidden_size, attention, GatedMlp(config.intermediate_size))
    return config.num_hidden_layers * (layer,)


FAMILY = Family("qwen2", "Qwen2", Config, layers, tiny=lambda shape: {})
