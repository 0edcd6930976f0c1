"""Qwen3-Next: gated delta nets, a gated attention in every fourth layer, experts and one that all
tokens share, with a gate. Qwen3.5 has the same layers (models/qwen3_5.py)."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import DeltaNet, Experts, GatedMlp, Layer
from vapo_megatron.models.parts import (
    LAYER,
    MLP,
    attention_block,
    expert,
    gated_mlp,
    norm,
    router,
    shared_expert,
)
from vapo_megatron.models.rules import HeadGroups, Replicated, Row, Rule, WholeHeadGroups

LayerType = Literal["linear_attention", "full_attention"]
NET = LAYER + "linear_attn."


class HybridConfig(DecoderConfig):
    """Keys of models whose layers have delta nets or attention. layer_types names them, or else
    every full_attention_interval-th has attention."""

    num_key_value_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    layer_types: list[LayerType] | None = None
    full_attention_interval: PositiveInt = 4
    attn_output_gate: bool = True
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_conv_kernel_dim: PositiveInt = 4
    mtp_num_hidden_layers: NonNegativeInt = 0

    def delta_net(self) -> DeltaNet:
        """The delta net of its layers. Raises BadConfig where the heads do not fit."""
        key_heads = self.linear_num_key_heads
        value_heads = self.linear_num_value_heads
        refuse_unless(
            value_heads % key_heads == 0,
            "linear_num_value_heads",
            value_heads,
            f"a multiple of linear_num_key_heads, {key_heads}",
        )
        return DeltaNet(
            key_heads,
            value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def types(self) -> list[LayerType]:
        """The kind of each layer. Raises BadConfig where none has attention, or not every layer is
        named."""
        count = self.num_hidden_layers
        interval = self.full_attention_interval
        types: list[LayerType] = self.layer_types or [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(count)
        ]
        refuse_unless(len(types) == count, "layer_types", types, f"one for each of {count} layers")
        refuse_unless(
            "full_attention" in types, "layer_types", types, "full_attention in some layer"
        )
        return types


class Config(HybridConfig):
    """Qwen3-Next's."""

    num_experts: PositiveInt = 512
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 10
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] | None = None


def hybrid_layers(
    config: HybridConfig,
    mlp: GatedMlp | Experts,
    projections: Callable[[int, DeltaNet], tuple[Rule, ...]],
) -> tuple[Layer, ...]:
    """Layers with delta nets and with attention, all with the same MLP. projections: from the
    hidden size to the rules of a delta net's input."""
    hidden = config.hidden_size
    refuse_unless(
        config.attn_output_gate,
        "attn_output_gate",
        config.attn_output_gate,
        "true: attention has a gate",
    )
    net = config.delta_net()
    attention = config.self_attention(partial_rotary=0.25, qk_norm="head", gated=True)
    feed_forward: tuple[Rule, ...]
    expert_rules: tuple[Rule, ...] = ()
    if isinstance(mlp, Experts):
        feed_forward = _routed(hidden, mlp)
        expert_rules = expert(hidden, mlp)
    else:
        feed_forward = gated_mlp(hidden, mlp.size)
    linear_rules = (
        norm("input_layernorm", LAYER + "input_layernorm", hidden),
        *projections(hidden, net),
        *_delta_net(hidden, net),
        norm("pre_mlp_layernorm", LAYER + "post_attention_layernorm", hidden),
    )
    full_rules = attention_block(hidden, attention)
    kinds = {
        "linear_attention": Layer(net, mlp, (*linear_rules, *feed_forward), expert_rules),
        "full_attention": Layer(attention, mlp, (*full_rules, *feed_forward), expert_rules),
    }
    return tuple(kinds[kind] for kind in config.types())


def _routed(hidden_size: int, experts: Experts) -> tuple[Rule, ...]:
    """The router, and what all tokens go through, with its gate."""
    gate = Replicated(
        "mlp.shared_experts.gate_weight", (MLP + "shared_expert_gate.weight",), (1, hidden_size)
    )
    shared = shared_expert(hidden_size, experts, MLP + "shared_expert.")
    return (*router(hidden_size, experts), *shared, gate)


def _delta_net(hidden_size: int, net: DeltaNet) -> tuple[Rule, ...]:
    """What follows the projections of its input."""
    heads = (net.value_heads,)
    blocks = ((net.key_size, net.key_size, net.value_size),)
    return (
        HeadGroups(
            "self_attention.conv_weight",
            (NET + "conv1d.weight",),
            (1, net.kernel),
            blocks,
            net.key_heads,
        ),
        Rule("self_attention.A_log", (NET + "A_log",), heads),
        Rule("self_attention.dt_bias", (NET + "dt_bias",), heads),
        Replicated("self_attention.norm_weight", (NET + "norm.weight",), (net.value_dim,)),
        Row(
            "self_attention.linear_proj.weight",
            (NET + "out_proj.weight",),
            (hidden_size, net.value_size),
        ),
    )


def _projections(hidden_size: int, net: DeltaNet) -> tuple[Rule, ...]:
    """In the files they have the parts of each key head together."""
    return (
        HeadGroups(
            "self_attention.linear_qkv.weight",
            (NET + "in_proj_qkvz.weight",),
            (hidden_size,),
            ((net.mixed_size + net.value_size,),),
            net.key_heads,
        ),
        WholeHeadGroups(
            "self_attention.gates_weight",
            (NET + "in_proj_ba.weight",),
            (hidden_size,),
            ((2 * net.value_heads,),),
            net.key_heads,
        ),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Experts in every layer."""
    every = "every layer must have experts; choose another checkpoint"
    step = config.decoder_sparse_step
    dense = config.mlp_only_layers
    refuse_unless(step == 1, "decoder_sparse_step", step, f"1: {every}")
    refuse_unless(not dense, "mlp_only_layers", dense, f"[]: {every}")
    experts = Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        size=config.moe_intermediate_size,
        normalised=config.norm_topk_prob,
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    check_experts(experts)
    return hybrid_layers(config, experts, _projections)


def features(config: HybridConfig) -> Mapping[str, Any]:
    """Files may have layers for multi-token prediction, under names that begin with "mtp."."""
    return {"zero_centred_norms": True, "predicts_ahead": True}


def tiny_net(shape: TinyModel) -> dict[str, Any]:
    """The keys of a small delta net; the last layer has attention however few there are."""
    return {
        "head_dim": shape.head_dim,
        "linear_num_key_heads": shape.kv_heads,
        "linear_num_value_heads": shape.heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": min(4, shape.layers),
    }


def tiny_experts(shape: TinyModel) -> dict[str, Any]:
    """The keys of small experts."""
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "shared_expert_intermediate_size": shape.intermediate_size,
    }


def tiny(shape: TinyModel) -> dict[str, Any]:
    """As Qwen3-Next has norm_topk_prob."""
    return tiny_net(shape) | tiny_experts(shape) | {"norm_topk_prob": True}


# On GPUs SGLang would count the shared expert among those that a token chose.
UNFUSED = {"disable_shared_experts_fusion": True}
FAMILY = Family("qwen3_next", "Qwen3Next", Config, layers, features, tiny, UNFUSED)
