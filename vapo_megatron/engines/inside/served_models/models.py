"""The model classes that this project trains, for SGLang's SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang otherwise imports all of its two hundred model files at every start, which takes longer than
everything else a server of a small model does. It still imports them for an architecture that is
not listed here.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.models import (
    deepseek_v2,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
)

from vapo_megatron.engines.inside import cpu_delta_net, cpu_shim
from vapo_megatron.models.layers import LatentAttention

_Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """SGLang's, whose output layer is the word embedding where config.json ties the two; SGLang
    leaves that out."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if config.tie_word_embeddings and self.pp_group.world_size == 1:
            self.lm_head = self.model.embed_tokens


def _of_language_model(weights: _Weights) -> _Weights:
    """The language model's tensors of a vision-language directory, under the names that it has
    alone."""
    for name, tensor in weights:
        if not name.startswith(("model.visual.", "mtp.")):
            yield name.replace("model.language_model.", "model.", 1), tensor


class Qwen3_5ForCausalLM(qwen3_5_text.Qwen3_5ForCausalLM):
    """SGLang's, which does not know the names of vision-language directories."""

    def load_weights(self, weights: _Weights) -> set[str]:
        """As SGLang's."""
        loaded: set[str] = super().load_weights(_of_language_model(weights))
        return loaded


class Qwen3_5MoeForCausalLM(qwen3_5_text.Qwen3_5MoeForCausalLM):
    """The same with experts."""

    def load_weights(self, weights: _Weights) -> set[str]:
        """As SGLang's."""
        loaded: set[str] = super().load_weights(_of_language_model(weights))
        return loaded


class DeepseekV2ForCausalLM(deepseek_v2.DeepseekV2ForCausalLM):
    """SGLang's, with the epsilon of transformers and of the trainer."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        _set_latent_epsilon(self)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """The same."""


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    """The same."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        _set_latent_epsilon(self)


def _set_latent_epsilon(model: torch.nn.Module) -> None:
    """Give the norms of latent attention's narrow vectors the epsilon that transformers has for
    them, where SGLang takes rms_norm_eps."""
    for name, module in model.named_modules():
        if name.endswith((".q_a_layernorm", ".kv_a_layernorm")):
            module.variance_epsilon = LatentAttention.norm_eps


def _square_sums(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """MiniMax-M2's sums of squares, [2 * tokens], queries first, then keys."""
    return torch.cat([x.float().square().sum(-1) for x in (queries, keys)])


def _normalized(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    sums: torch.Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """Queries and keys [tokens, channels] by their sums over all ranks' channels."""
    outputs = []
    parts = ((queries, query_weight), (keys, key_weight))
    for (x, weight), total in zip(parts, sums.chunk(2), strict=True):
        factor = torch.rsqrt(total / (x.shape[-1] * tp_world) + eps)
        outputs.append((x.float() * factor[:, None] * weight.float()).to(x.dtype))
    return tuple(outputs)


if cpu_shim.install():
    # SGLang has these as Triton kernels alone.
    minimax_m2.rms_sumsq_serial = _square_sums
    minimax_m2.rms_apply_serial = _normalized
    qwen2_moe.fused_gate_sigmoid_mul_add = cpu_delta_net.fused_gate_sigmoid_mul_add
    # Their operator, which SGLang takes only where it has AVX-512's.
    layernorm_gated._use_cpu = True
    fused_norm_gate._use_cpu = True

_modules = (glm4_moe, gpt_oss, llama, minimax_m2, mistral, qwen2, qwen3, qwen3_next)
_entries = [module.EntryClass for module in _modules]
EntryClass = [
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
]
for _entry in _entries:
    EntryClass += _entry if isinstance(_entry, list) else [_entry]
