"""GLM-4.5, 4.6 and 4.7: experts chosen by a sigmoid and a bias, one that all tokens share, dense
layers before them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import Experts, GatedMlp, Layer
from vapo_megatron.models.parts import MLP, decoder_layer, gated_mlp


class Config(DecoderConfig):
    """GLM-4.5's. Biases and norms of the attention are optional: the file decides."""

    num_key_value_heads: PositiveInt | None = 8
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    partial_rotary_factor: float | None = None
    n_routed_experts: PositiveInt
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt
    n_shared_experts: NonNegativeInt = 1
    routed_scaling_factor: PositiveFloat = 1.0
    norm_topk_prob: bool = True
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    first_k_dense_replace: NonNegativeInt = 1
    num_nextn_predict_layers: NonNegativeInt = 0


def layers(config: Config) -> tuple[Layer, ...]:
    """Dense layers, then layers with experts."""
    refuse_unless(
        config.norm_topk_prob,
        "norm_topk_prob",
        config.norm_topk_prob,
        "true: Megatron always normalises the weights of experts that a sigmoid gives",
    )
    dense_layers = config.first_k_dense_replace
    refuse_unless(
        dense_layers < config.num_hidden_layers,
        "first_k_dense_replace",
        dense_layers,
        f"less than the {config.num_hidden_layers} layers",
    )
    attention = config.self_attention(
        partial_rotary=0.5,
        qkv_bias=config.attention_bias,
        qk_norm="head" if config.use_qk_norm else None,
    )
    experts = Experts(
        count=config.n_routed_experts,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        scores="sigmoid",
        normalised=True,
        factor=config.routed_scaling_factor,
        bias=True,
        groups=config.n_group,
        groups_per_token=config.topk_group,
        shared_size=config.n_shared_experts * config.moe_intermediate_size,
    )
    check_experts(experts)
    dense = decoder_layer(config.hidden_size, attention, GatedMlp(config.intermediate_size))
    sparse = decoder_layer(config.hidden_size, attention, experts)
    if not experts.shared_size:
        empty = gated_mlp(config.hidden_size, 0, MLP + "shared_experts.")
        sparse = replace(sparse, empty_rules=empty)
    sparse_layers = config.num_hidden_layers - dense_layers
    return dense_layers * (dense,) + sparse_layers * (sparse,)


def features(config: Config) -> Mapping[str, Any]:
    """Files may have layers for multi-token prediction after the last."""
    return {"predicts_ahead": True}


def tiny(shape: TinyModel) -> dict[str, Any]:
    """As GLM-4.5 has biases, norms and factor."""
    return {
        "head_dim": shape.head_dim,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "glm4_moe",
    "Glm4Moe",
    Config,
    layers,
    features,
    tiny,
    # On GPUs SGLang would count the shared expert among those that a token chose.
    engine={"disable_shared_experts_fusion": True},
)
