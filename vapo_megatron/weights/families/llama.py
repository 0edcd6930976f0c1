"""Llama 2 and 3.x."""

from vapo_megatron.weights.families.family import (
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_WEIGHT,
    Family,
)

LLAMA = Family(
    model_type="llama",
    classes="Llama",
    layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
)
