"""Mistral 7B and its successors under the same model type: Llama's layers, with a sliding window in version 0.1."""

from vapo_megatron.weights.families.family import (
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_WEIGHT,
    Family,
)

MISTRAL = Family(
    model_type="mistral",
    classes="Mistral",
    layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": True},
)
