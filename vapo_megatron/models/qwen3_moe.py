"""Qwen3 with a mixture of experts in every layer: Qwen3's attention, a router, no shared expert."""

from typing import Any, ClassVar

from pydantic import AliasChoices, Field, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import Experts, Layer
from vapo_megatron.models.parts import decoder_layer


class Config(DecoderConfig):
    """Qwen3-MoE's."""

    bounded_by_window: ClassVar[bool | None] = None

    num_key_value_heads: PositiveInt | None = 4
    # transformers 5 has num_local_experts.
    num_experts: PositiveInt = Field(
        validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] | None = None


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    every = "every layer must have experts; choose another checkpoint"
    refuse_unless(
        config.decoder_sparse_step == 1,
        "decoder_sparse_step",
        config.decoder_sparse_step,
        f"1: {every}",
    )
    refuse_unless(
        not config.mlp_only_layers, "mlp_only_layers", config.mlp_only_layers, f"[]: {every}"
    )
    experts = Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
    )
    check_experts(experts)
    layer = decoder_layer(config.hidden_size, config.self_attention(qk_norm="head"), experts)
    return config.num_hidden_layers * (layer,)


def tiny(shape: TinyModel) -> dict[str, Any]:
    """As the published models have norm_topk_prob; transformers' default is false."""
    return {
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
    }


FAMILY = Family("qwen3_moe", "Qwen3Moe", Config, layers, tiny=tiny)
