"""MiniMax-M2: norms over all heads of queries and keys, a part of each head turned, experts chosen
by a sigmoid and a bias in every layer."""

from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt, model_validator

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import Experts, Layer
from vapo_megatron.models.parts import LAYER, attention_block, expert, router

MOE = LAYER + "block_sparse_moe."


class Config(DecoderConfig):
    """MiniMax-M2's; intermediate_size is an expert's."""

    default_theta: ClassVar[float] = 5_000_000.0

    head_dim: PositiveInt | None = 128
    num_local_experts: PositiveInt
    num_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 8
    rotary_dim: PositiveInt | None = None
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    use_routing_bias: bool = True
    scoring_func: str = "sigmoid"
    shared_intermediate_size: NonNegativeInt = 0

    @model_validator(mode="after")
    def _name_rotary_dim_as_others_do(self) -> "Config":
        if self.rotary_dim is not None and self.head_dim is not None:
            self.raw.setdefault("partial_rotary_factor", self.rotary_dim / self.head_dim)
        return self


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    for key, expected in (
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("use_routing_bias", True),
        ("scoring_func", "sigmoid"),
        ("shared_intermediate_size", 0),
    ):
        value = getattr(config, key)
        refuse_unless(value == expected, key, value, f"{expected}: choose another checkpoint")
    attention = config.self_attention(partial_rotary=1.0, qk_norm="all")
    experts = Experts(
        count=config.num_local_experts,
        per_token=config.num_experts_per_tok,
        size=config.intermediate_size,
        scores="sigmoid",
        normalised=True,
        bias=True,
    )
    check_experts(experts)
    hidden = config.hidden_size
    gate = router(hidden, experts, MOE + "gate.weight", MOE + "e_score_correction_bias")
    layer = Layer(
        attention,
        experts,
        rules=(*attention_block(hidden, attention), *gate),
        expert_rules=expert(hidden, experts, MOE + "experts.{expert}.", ("w1", "w3", "w2")),
    )
    return config.num_hidden_layers * (layer,)


def tiny(shape: TinyModel) -> dict[str, Any]:
    """With the keys of the published config.json that SGLang reads."""
    return {
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "rotary_dim": shape.head_dim // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    }


FAMILY = Family("minimax_m2", "MiniMaxM2", Config, layers, tiny=tiny)
