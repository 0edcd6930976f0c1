"""Qwen3-MoE, with the tied word embeddings that SGLang's class leaves out: all published checkpoints are untied."""

from typing import Any

from sglang.srt.models import qwen3_moe


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """SGLang's, whose output layer is the word embedding where config.json ties the two."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if config.tie_word_embeddings and self.pp_group.world_size == 1:
            self.lm_head = self.model.embed_tokens


EntryClass = Qwen3MoeForCausalLM
