"""Mistral 7B and its successors under the same model type: Llama's layers, with a sliding window in
version 0.1."""

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.llama import layers


class Config(DecoderConfig):
    """transformers reads no use_sliding_window here."""

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096
    use_sliding_window: bool = True


FAMILY = Family("mistral", "Mistral", Config, layers)
