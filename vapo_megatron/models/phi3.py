"""Phi-3, Phi-3.5 and Phi-4: Llama's layers, with fused projections in the files."""

from typing import ClassVar

from pydantic import PositiveFloat

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import ATTENTION, LAYER, fused_gated_mlp, norm
from vapo_megatron.models.rules import FusedQKV, Row


class Config(DecoderConfig):
    """Every layer has the window, where the file has one. longrope is refused
    (models/rotary.py)."""

    bounded_by_window: ClassVar[bool | None] = True

    rms_norm_eps: PositiveFloat = 1e-5


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    hidden = config.hidden_size
    attention = config.self_attention(partial_rotary=1.0)
    qkv = FusedQKV(
        "self_attention.linear_qkv.weight",
        (ATTENTION + "qkv_proj.weight",),
        (hidden,),
        attention.query_size,
        attention.kv_size,
        attention.num_kv_heads,
    )
    output = Row(
        "self_attention.linear_proj.weight",
        (ATTENTION + "o_proj.weight",),
        (hidden, attention.query_size),
    )
    rules = (
        norm("input_layernorm", LAYER + "input_layernorm", hidden),
        qkv,
        output,
        norm("pre_mlp_layernorm", LAYER + "post_attention_layernorm", hidden),
        *fused_gated_mlp(hidden, config.intermediate_size),
    )
    layer = Layer(attention, GatedMlp(config.intermediate_size), rules)
    return config.num_hidden_layers * (layer,)


FAMILY = Family("phi3", "Phi3", Config, layers, tiny=lambda shape: {})
