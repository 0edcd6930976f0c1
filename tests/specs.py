"""Specs of small models without a directory."""

from vapo_megatron.models.registry import FAMILIES
from vapo_megatron.models.spec import ModelSpec

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 18,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}


def spec_of(family: str, divisible_by: int = 1, **changes: int) -> ModelSpec:
    """The spec of a family; changes: to SIZES, by keys of config.json."""
    read = FAMILIES[family].config.model_fields
    known = {key: value for key, value in (SIZES | changes).items() if key in read}
    return FAMILIES[family].spec(known, vocab_divisible_by=divisible_by)
