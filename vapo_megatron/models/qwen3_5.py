"""Qwen3.5's language models, dense: gated delta nets, and a gated attention in every fourth
layer."""

from pydantic import PositiveInt

from vapo_megatron.models.family import Family
from vapo_megatron.models.layers import DeltaNet, GatedMlp, Layer
from vapo_megatron.models.qwen3_next import NET, HybridConfig, features, hybrid_layers, tiny_net
from vapo_megatron.models.rules import HeadGroups, Rule, WholeHeadGroups


class Config(HybridConfig):
    """Qwen3.5's text_config."""

    num_key_value_heads: PositiveInt | None = 4


def projections(hidden_size: int, net: DeltaNet) -> tuple[Rule, ...]:
    """In the files queries stand above keys above values, each with all heads."""
    return (
        HeadGroups(
            "self_attention.linear_qkv.weight",
            (NET + "in_proj_qkv.weight", NET + "in_proj_z.weight"),
            (hidden_size,),
            ((net.key_size, net.key_size, net.value_size), (net.value_size,)),
            net.key_heads,
        ),
        WholeHeadGroups(
            "self_attention.gates_weight",
            (NET + "in_proj_b.weight", NET + "in_proj_a.weight"),
            (hidden_size,),
            ((net.value_heads,), (net.value_heads,)),
            net.key_heads,
        ),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """With delta nets and with attention."""
    return hybrid_layers(config, GatedMlp(config.intermediate_size), projections)


FAMILY = Family("qwen3_5_text", "Qwen3_5", Config, layers, features, tiny_net, nested="qwen3_5")
