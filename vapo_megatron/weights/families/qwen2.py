"""Qwen2 and Qwen2.5: biases on query, key and value."""

from vapo_megatron.weights.families.family import (
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_BIAS,
    QKV_WEIGHT,
    Family,
)

QWEN2 = Family(
    model_type="qwen2",
    classes="Qwen2",
    layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
    qkv_bias=True,
)
