"""SmolLM3: Llama's layers, some of which do not encode positions (NoPE, arXiv 2501.18795)."""

from dataclasses import replace
from typing import ClassVar

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family, refuse_unless
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """no_rope_layers has a number for each layer: 0 where positions are not encoded."""

    default_theta: ClassVar[float] = 2_000_000.0
    bounded_by_window: ClassVar[bool | None] = None

    num_key_value_heads: PositiveInt | None = 4
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: PositiveInt = 4
    tie_word_embeddings: bool = True


def layers(config: Config) -> tuple[Layer, ...]:
    """With and without a rotary embedding."""
    count = config.num_hidden_layers
    encodes = config.no_rope_layers
    if not encodes:
        encodes = [int((layer + 1) % config.no_rope_layer_interval != 0) for layer in range(count)]
    refuse_unless(
        len(encodes) == count, "no_rope_layers", encodes, f"a number for each of {count} layers"
    )
    attention = config.self_attention()
    mlp = GatedMlp(config.intermediate_size)
    turned = decoder_layer(config.hidden_size, attention, mlp)
    unturned = decoder_layer(config.hidden_size, replace(attention, rotary=None), mlp)
    return tuple(turned if encoded else unturned for encoded in encodes)


FAMILY = Family("smollm3", "SmolLM3", Config, layers, tiny=lambda shape: {})
