"""Parts of a model are the same parameters whichever layers it is made of."""

import torch
from torch.nn import Module

from vapo_megatron.megatron.layer_spec import freeze_attention

# A layer's parameters by their Hugging Face names, under Megatron's own layers and under
# Transformer Engine's.
LOCAL = {
    "norm": "decoder.layers.0.input_layernorm.weight",
    "qkv": "decoder.layers.0.self_attention.linear_qkv.weight",
    "q_norm": "decoder.layers.0.self_attention.q_layernorm.weight",
    "o": "decoder.layers.0.self_attention.linear_proj.weight",
    "up": "decoder.layers.0.mlp.linear_fc1.weight",
}
FUSED = LOCAL | {"norm": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"}


def chosen(names: dict[str, str]) -> set[str]:
    model = Module()
    by_identity = {}
    for short, name in names.items():
        at = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.ones(1)))
        by_identity[id(getattr(at, last))] = short
    freeze_attention(model)
    return {
        by_identity[id(parameter)]
        for parameter in model.parameters()
        if not parameter.requires_grad
    }


def test_a_norm_held_by_a_linear_layer_is_no_part_of_attention() -> None:
    assert chosen(LOCAL) == chosen(FUSED) == {"qkv", "q_norm", "o"}
