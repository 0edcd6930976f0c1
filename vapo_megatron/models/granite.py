"""Granite 3, dense: Llama's layers with factors on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import PositiveFloat

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """attention_multiplier is the scale of the scores; logits are divided by logits_scaling."""

    embedding_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    logits_scaling: PositiveFloat = 1.0


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    attention = config.self_attention(scale=config.attention_multiplier)
    layer = decoder_layer(config.hidden_size, attention, GatedMlp(config.intermediate_size))
    layer = replace(layer, residual_factor=config.residual_multiplier)
    return config.num_hidden_layers * (layer,)


def features(config: Config) -> Mapping[str, Any]:
    """Factors outside the layers."""
    return {
        "embedding_factor": config.embedding_multiplier,
        "logits_factor": 1.0 / config.logits_scaling,
    }


def tiny(shape: Any) -> dict[str, Any]:
    """With factors as Granite 3 has them."""
    return {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 1.0 / shape.head_dim,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }


FAMILY = Family("granite", "Granite", Config, layers, features, tiny)
