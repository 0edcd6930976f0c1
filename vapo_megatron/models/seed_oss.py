"""Seed-OSS: Qwen2's layers with an explicit head size."""

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """Biases on query, key and value exist unless the file says otherwise."""

    head_dim: PositiveInt | None = 128
    attention_bias: bool = True


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    attention = config.self_attention(qkv_bias=config.attention_bias)
    layer = decoder_layer(config.hidden_size, attention, GatedMlp(config.intermediate_size))
    return config.num_hidden_layers * (layer,)


FAMILY = Family("seed_oss", "SeedOss", Config, layers)
