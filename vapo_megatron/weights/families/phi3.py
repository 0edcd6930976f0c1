"""Phi-3 and Phi-4, reasoning models too: Llama's layers, query, key and value in one tensor, gate and up in another."""

from vapo_megatron.weights.families.family import (
    INPUT_NORM,
    LAYER,
    MLP_NORM,
    OUTPUT_PROJECTION,
    Family,
)
from vapo_megatron.weights.rules import FusedGateUp, FusedQKV, Row

PHI3 = Family(
    model_type="phi3",
    classes="Phi3",
    layer=(
        INPUT_NORM,
        FusedQKV("self_attention.linear_qkv.weight", (LAYER + "self_attn.qkv_proj.weight",), ("hidden_size",)),
        OUTPUT_PROJECTION,
        MLP_NORM,
        FusedGateUp("mlp.linear_fc1.weight", (LAYER + "mlp.gate_up_proj.weight",), ("ffn_size", "hidden_size")),
        Row("mlp.linear_fc2.weight", (LAYER + "mlp.down_proj.weight",), ("hidden_size", "ffn_size")),
    ),
    defaults={"rms_norm_eps": 1e-5, "use_sliding_window": True},
)
