"""Mistral 7B and its successors under the same model type: Llama's layers, with a sliding window in version 0.1."""

from dataclasses import replace

from vapo_megatron.weights.families.llama import LLAMA

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    classes="Mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": True},
)
