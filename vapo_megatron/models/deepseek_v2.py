"""DeepSeek-V2-Lite: latent attention without a narrow vector of queries, experts chosen by a
softmax among all, experts that all tokens share, dense layers first."""

from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.deepseek_v3 import LatentConfig, tiny_latent
from vapo_megatron.models.family import Family, check_experts, refuse_unless
from vapo_megatron.models.layers import Experts, Layer


class Config(LatentConfig):
    """DeepSeek-V2's. Groups of experts, which the larger V2 chooses by their best expert, are
    refused."""

    q_lora_rank: PositiveInt | None = 1536
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    n_shared_experts: NonNegativeInt | None = 2
    norm_topk_prob: bool = False
    first_k_dense_replace: NonNegativeInt = 0
    moe_layer_freq: int = 1
    scoring_func: str = "softmax"
    topk_method: str | None = "greedy"

    def experts(self) -> Experts:
        """Weighted by a softmax over all experts."""
        experts = Experts(
            count=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            size=self.moe_intermediate_size,
            factor=self.routed_scaling_factor,
            shared_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
        )
        check_experts(experts)
        return experts


def layers(config: Config) -> tuple[Layer, ...]:
    """Dense layers, then layers with experts."""
    for key, expected in (
        ("moe_layer_freq", 1),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
    ):
        value = getattr(config, key)
        refuse_unless(value == expected, key, value, f"{expected}: choose another checkpoint")
    return config.dense_then_sparse(config.first_k_dense_replace)


def tiny(shape: TinyModel) -> dict[str, Any]:
    """With the keys of the published config.json that SGLang reads."""
    return tiny_latent(shape) | {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": min(1, shape.layers - 1),
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    }


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2",
    Config,
    layers,
    tiny=tiny,
    # On GPUs SGLang would count the shared experts among those that a token chose.
    engine={"disable_shared_experts_fusion": True},
)
