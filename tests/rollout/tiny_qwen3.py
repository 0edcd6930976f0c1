"""A tiny random Qwen3 whose log-probs transformers gives."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

EOS = 1


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Random weights large enough that two seeds, two layers or two heads give clearly different log-probs."""
    torch.manual_seed(seed)
    config = Qwen3Config(
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
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).float().eval()


@torch.no_grad()
def token_logprobs(model: Qwen3ForCausalLM, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of every token but the first, given those before it."""
    logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
