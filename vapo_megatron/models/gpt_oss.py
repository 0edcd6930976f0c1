"""gpt-oss: attention with sinks, biases, and windows in every other layer; experts with biases and
a clamped activation, all experts of a layer in one tensor."""

from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import ClampedSwiGLU, Experts, Layer, SelfAttention
from vapo_megatron.models.parts import MLP, attention_block, router
from vapo_megatron.models.rules import Replicated
from vapo_megatron.models.stacked_experts import stacked_experts

LayerType = Literal["sliding_attention", "full_attention"]

# The rotary scaling of a file that has none.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Config(DecoderConfig):
    """gpt-oss's; intermediate_size is an expert's."""

    default_theta: ClassVar[float] = 150_000.0

    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 64
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = True
    num_local_experts: PositiveInt
    num_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 4
    sliding_window: PositiveInt | None = 128
    layer_types: list[LayerType] | None = None
    swiglu_alpha: PositiveFloat = 1.702
    swiglu_limit: PositiveFloat = 7.0

    @model_validator(mode="after")
    def _scale_rotary_embedding(self) -> "Config":
        if self.raw.get("rope_parameters") is None and not self.raw.get("rope_scaling"):
            self.raw["rope_parameters"] = _YARN
        return self


def layers(config: Config) -> tuple[Layer, ...]:
    """With a window and without."""
    count = config.num_hidden_layers
    refuse_unless(
        config.attention_bias,
        "attention_bias",
        config.attention_bias,
        "true: the experts have some",
    )
    types = config.layer_types or _alternating(count)
    refuse_unless(len(types) == count, "layer_types", types, f"one for each of {count} layers")
    experts = Experts(
        count=config.num_local_experts,
        per_token=config.num_experts_per_tok,
        size=config.intermediate_size,
        normalised=True,
        activation=ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit),
        linear_biases=True,
    )
    check_experts(experts)
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = {
        kind: _layer(
            config,
            config.self_attention(qkv_bias=True, output_bias=True, sinks=True, window=window),
            experts,
        )
        for kind, window in windows.items()
    }
    return tuple(kinds[kind] for kind in types)


def _alternating(count: int) -> list[LayerType]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(count)]


def _layer(config: Config, attention: SelfAttention, experts: Experts) -> Layer:
    hidden = config.hidden_size
    gate = (
        *router(hidden, experts, MLP + "router.weight"),
        Replicated("mlp.router.bias", (MLP + "router.bias",), (experts.count,)),
    )
    return Layer(
        attention,
        experts,
        rules=(*attention_block(hidden, attention), *gate),
        expert_rules=stacked_experts(hidden, experts, MLP + "experts."),
    )


def tiny(shape: TinyModel) -> dict[str, Any]:
    """With a window that a short text leaves, and the published scaling from a short context."""
    return {
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "sliding_window": 16,
        "rope_parameters": {
            **_YARN,
            "rope_theta": Config.default_theta,
            "original_max_position_embeddings": 64,
        },
    }


FAMILY = Family("gpt_oss", "GptOss", Config, layers, tiny=tiny, quantised="mxfp4")
