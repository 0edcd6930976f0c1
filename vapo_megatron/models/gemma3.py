"""Gemma 3, text: windows in five of six layers, two rotary tables, norms before and after,
GeGLU."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family, refuse_unless
from vapo_megatron.models.layers import GatedMlp, Layer, SelfAttention
from vapo_megatron.models.parts import LAYER, decoder_layer, norm
from vapo_megatron.models.rotary import (
    Rotary,
    check_rope_by_layer_type,
    read_rope,
    rope_parameters,
)

LayerType = Literal["sliding_attention", "full_attention"]


class Config(DecoderConfig):
    """layer_types names the layers with a window; older files have sliding_window_pattern."""

    default_theta: ClassVar[float] = 1_000_000.0

    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    # The file's hidden_act, if it has one, says nothing: transformers reads hidden_activation.
    hidden_act: Literal["silu"] = Field(default="silu", validation_alias="no such key")
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveFloat = 256.0
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt = 6
    layer_types: list[LayerType] | None = None
    rope_local_base_freq: PositiveFloat = 10_000.0
    use_bidirectional_attention: bool | None = False


def layers(config: Config) -> tuple[Layer, ...]:
    """With a window and without."""
    count = config.num_hidden_layers
    refuse_unless(
        config.hidden_activation == "gelu_pytorch_tanh",
        "hidden_activation",
        config.hidden_activation,
        "gelu_pytorch_tanh",
    )
    refuse_unless(
        not config.use_bidirectional_attention, "use_bidirectional_attention", True, "false"
    )
    types = config.layer_types or _by_pattern(config)
    refuse_unless(len(types) == count, "layer_types", types, f"one for each of {count} layers")
    check_rope_by_layer_type(config.raw)
    full = config.self_attention(qk_norm="head", scale=config.query_pre_attn_scalar**-0.5)
    local = replace(full, window=config.sliding_window, rotary=_local_rotary(config, full))
    kinds = {
        "full_attention": _layer(config, full),
        "sliding_attention": _layer(config, local),
    }
    return tuple(kinds[kind] for kind in types)


def _by_pattern(config: Config) -> list[LayerType]:
    """The last of every sliding_window_pattern layers has no window."""
    types: list[LayerType] = []
    for layer in range(config.num_hidden_layers):
        is_full = (layer + 1) % config.sliding_window_pattern == 0
        types.append("full_attention" if is_full else "sliding_attention")
    return types


def _local_rotary(config: Config, full: SelfAttention) -> Rotary:
    """The table of layers with a window: their own entry (transformers 5) or base (4), unscaled."""
    if "sliding_attention" in rope_parameters(config.raw):
        own = {**config.raw, "rope_theta": config.rope_local_base_freq}
        theta, scaling = read_rope(own, "sliding_attention")
        return Rotary(theta, full.head_dim, scaling)
    return Rotary(config.rope_local_base_freq, full.head_dim)


def _layer(config: Config, attention: SelfAttention) -> Layer:
    size = config.hidden_size
    mlp = GatedMlp(config.intermediate_size, "gelu_tanh")
    layer = decoder_layer(size, attention, mlp)
    others = tuple(rule for rule in layer.rules if rule.megatron != "pre_mlp_layernorm.weight")
    norms = (
        norm("self_attn_bda.norm", LAYER + "post_attention_layernorm", size),
        norm("pre_mlp_layernorm", LAYER + "pre_feedforward_layernorm", size),
        norm("mlp_bda.norm", LAYER + "post_feedforward_layernorm", size),
    )
    return replace(layer, rules=(*others, *norms), norm_after=True)


def features(config: Config) -> Mapping[str, Any]:
    """Norms multiply by 1 + weight; embeddings are scaled by the square root of their width."""
    return {"zero_centred_norms": True, "embedding_factor": math.sqrt(config.hidden_size)}


def tiny(shape: Any) -> dict[str, Any]:
    """With a window that a short text leaves."""
    return {
        "head_dim": shape.head_dim,
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": 16,
    }


FAMILY = Family("gemma3_text", "Gemma3", Config, layers, features, tiny)
