"""The model classes that this project trains, for SGLang's SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang otherwise imports all of its two hundred model files at every start, which takes longer than everything else a
server of a small model does. It still imports them when asked for an architecture that is not here.
"""

from typing import Any

from sglang.srt.models import llama, mistral, qwen2, qwen3, qwen3_moe


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """SGLang's, whose output layer is the word embedding where config.json ties the two; SGLang leaves that out."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if config.tie_word_embeddings and self.pp_group.world_size == 1:
            self.lm_head = self.model.embed_tokens


_entries = [module.EntryClass for module in (llama, mistral, qwen2, qwen3)]
EntryClass = [Qwen3MoeForCausalLM]
for _entry in _entries:
    EntryClass += _entry if isinstance(_entry, list) else [_entry]
