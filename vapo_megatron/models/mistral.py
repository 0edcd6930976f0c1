"""Mistral 7B and its successors under the same model type: Llama's layers, with a sliding window in
version 0.1."""

from typing import ClassVar

from pydantic import PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family
from vapo_megatron.models.llama import layers


class Config(DecoderConfig):
    """transformers reads no use_sliding_window here."""

    bounded_by_window: ClassVar[bool | None] = True

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096


FAMILY = Family("mistral", "Mistral", Config, layers)
