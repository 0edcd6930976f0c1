"""Phi-3, Phi-3.5 and Phi-4: Llama's layers, with fused projections in the files."""

from typing import ClassVar

from pydantic import PositiveFloat, model_validator

from vapo_megatron.models.family import DecoderConfig, Family, refuse_unless
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import ATTENTION, LAYER, fused_gated_mlp, norm
from vapo_megatron.models.rules import FusedQKV, Row


class Config(DecoderConfig):
    """Every layer has the window, where the file has one. transformers knows no scaling of the
    rotary embedding but longrope, and reads its original context beside it."""

    bounded_by_window: ClassVar[bool | None] = True

    rms_norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _complete_rotary_embedding(self) -> "Config":
        self.raw.setdefault("original_max_position_embeddings", 4096)
        return self


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    hidden = config.hidden_size
    attention = config.self_attention(partial_rotary=1.0)
    assert attention.rotary is not None
    scaling = attention.rotary.scaling
    refuse_unless(
        scaling is None or scaling.kind == "longrope",
        "rope_type",
        None if scaling is None else repr(scaling.kind),
        "'longrope' or 'default'",
    )
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
