"""Qwen3.5's language models with experts, one of them shared by all tokens, with a gate."""

from typing import Any

from pydantic import PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import Family, check_experts
from vapo_megatron.models.layers import Experts, Layer
from vapo_megatron.models.qwen3_5 import projections
from vapo_megatron.models.qwen3_next import (
    UNFUSED,
    HybridConfig,
    features,
    hybrid_layers,
    tiny_experts,
    tiny_net,
)


class Config(HybridConfig):
    """Qwen3.5-MoE's text_config, which has no intermediate_size."""

    intermediate_size: PositiveInt = 512
    num_experts: PositiveInt = 256
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512


def layers(config: Config) -> tuple[Layer, ...]:
    """Experts in every layer; the weights of a token's experts always sum to 1."""
    experts = Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        normalised=True,
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    check_experts(experts)
    return hybrid_layers(config, experts, projections)


def tiny(shape: TinyModel) -> dict[str, Any]:
    """Delta nets and experts."""
    return tiny_net(shape) | tiny_experts(shape)


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    Config,
    layers,
    features,
    tiny,
    UNFUSED,
    nested="qwen3_5_moe",
)
