"""GLM-4-0414, dense: norms before and after, half of each head turned, gate and up in one
tensor."""

from pydantic import PositiveFloat, PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.layers import GatedMlp, Layer
from vapo_megatron.models.parts import LAYER, fused_gated_mlp, norm, self_attention


class Config(DecoderConfig):
    """Pairs of turned channels are neighbours."""

    num_key_value_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 128
    rms_norm_eps: PositiveFloat = 1.5625e-07
    attention_bias: bool = True


def layers(config: Config) -> tuple[Layer, ...]:
    """All alike."""
    hidden = config.hidden_size
    attention = config.self_attention(
        partial_rotary=0.5, interleaved=True, qkv_bias=config.attention_bias
    )
    rules = (
        norm("input_layernorm", LAYER + "input_layernorm", hidden),
        *self_attention(hidden, attention),
        norm("self_attn_bda.norm", LAYER + "post_self_attn_layernorm", hidden),
        norm("pre_mlp_layernorm", LAYER + "post_attention_layernorm", hidden),
        *fused_gated_mlp(hidden, config.intermediate_size),
        norm("mlp_bda.norm", LAYER + "post_mlp_layernorm", hidden),
    )
    layer = Layer(attention, GatedMlp(config.intermediate_size), rules, norm_after=True)
    return config.num_hidden_layers * (layer,)


FAMILY = Family("glm4", "Glm4", Config, layers)
