"""Qwen3 with a mixture of experts in every layer: Qwen3's attention, a router, no shared expert."""

from vapo_megatron.weights.families.family import (
    GATED_EXPERT,
    INPUT_NORM,
    KEY_NORM,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_WEIGHT,
    QUERY_NORM,
    ROUTER,
    Family,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    classes="Qwen3Moe",
    layer=(INPUT_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUTPUT_PROJECTION, MLP_NORM, ROUTER),
    expert=GATED_EXPERT,
    qk_norm=True,
    defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
)
