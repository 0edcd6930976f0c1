"""Qwen3, dense: norms on queries and keys, no biases, a head size of its own."""

from vapo_megatron.weights.families.family import (
    GATED_MLP,
    INPUT_NORM,
    KEY_NORM,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_WEIGHT,
    QUERY_NORM,
    Family,
)

QWEN3 = Family(
    model_type="qwen3",
    classes="Qwen3",
    layer=(INPUT_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
    qk_norm=True,
    defaults={"head_dim": 128},
)
