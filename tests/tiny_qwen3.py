"""Tiny random Qwen3 models, with and without experts, whose log-probs transformers gives."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vapo_megatron.engines.weight_sync.session import WeightSync

EOS = 1
SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=EOS,
    pad_token_id=2,
    # Large enough that two seeds, two layers, two heads or two experts give clearly different
    # log-probs.
    initializer_range=0.1,
)
EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
)


def make_model(seed: int, **changes: Any) -> Qwen3ForCausalLM:
    """A dense model in float32. changes: of its config."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes)).float().eval()


def make_moe(seed: int, **changes: Any) -> Qwen3MoeForCausalLM:
    """Likewise, with experts in every layer."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS | changes)).float().eval()


@torch.no_grad()
def token_logprobs(
    model: PreTrainedModel, tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-prob of every token but the first, given those before it."""
    logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@torch.no_grad()
def chosen_experts(model: Qwen3MoeForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Those of transformers for each token, [tokens, layers, k]."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def largest_difference(
    sync: WeightSync, sequences: Sequence[Sequence[int]], expected: Sequence[Sequence[float]]
) -> float:
    """Of log-probs that an engine gives the tokens of sequences from those expected, the largest of
    all engines."""
    return max(
        found.largest for found in sync.logprob_differences(sequences, expected, 1.0).values()
    )
