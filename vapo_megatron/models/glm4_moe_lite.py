"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts with GLM-4.5's sizes."""

from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.deepseek_v3 import (
    LatentConfig,
    count_dense_layers,
    features,
    tiny_latent,
)
from vapo_megatron.models.family import Family
from vapo_megatron.models.layers import Layer


class Config(LatentConfig):
    """GLM-4.7-Flash's. Which layers are dense is a list (transformers), or a number of first ones
    (the published file)."""

    reads_interleave: ClassVar[bool] = True

    rms_norm_eps: PositiveFloat = 1e-5
    q_lora_rank: PositiveInt | None = 768
    qk_nope_head_dim: PositiveInt = 192
    v_head_dim: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 4
    n_shared_experts: NonNegativeInt | None = 1
    routed_scaling_factor: PositiveFloat = 1.8
    first_k_dense_replace: NonNegativeInt | None = None
    mlp_layer_types: list[str] | None = None


def layers(config: Config) -> tuple[Layer, ...]:
    """Dense layers, then layers with experts."""
    first = 1 if config.first_k_dense_replace is None else config.first_k_dense_replace
    return config.dense_then_sparse(count_dense_layers(config, config.mlp_layer_types, first))


def tiny(shape: TinyModel) -> dict[str, Any]:
    """The first layer dense, if there are several."""
    dense_layers = min(1, shape.layers - 1)
    kinds = ["dense"] * dense_layers + ["sparse"] * (shape.layers - dense_layers)
    return tiny_latent(shape) | {"mlp_layer_types": kinds, "first_k_dense_replace": dense_layers}


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLite",
    Config,
    layers,
    features,
    tiny,
    # On GPUs SGLang would count the shared expert among those that a token chose.
    engine={"disable_shared_experts_fusion": True},
)
