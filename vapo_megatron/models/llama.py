"""Llama 2 and 3.x."""

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


def layers(config: DecoderConfig) -> tuple[Layer, ...]:
    """All alike."""
    layer = decoder_layer(
        config.hidden_size, config.self_attention(), GatedMlp(config.intermediate_size)
    )
    return config.num_hidden_layers * (layer,)


FAMILY = Family("llama", "Llama", DecoderConfig, layers)
