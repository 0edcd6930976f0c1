"""The families under test, a row each: a new family adds its row here and to nothing else.

tests/models (config, rules), tests/weights (logits, values, round trips, conversion, saved keys),
tests/megatron (gradients, checkpoints, adapters) and tests/operations (plan) run on every row.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A family's small model.

    Attributes:
        classes: what transformers' class names begin with.
        sizes: keys of its config beyond hf_models.SIZES, every feature of the family on.
        experts: whether it has experts, so that its layouts have ep.
        head_dim, kv_heads: of its attention.
        served: whether SGLang serves it on a CPU.
        engine_keys: keys of published config.json files that engines read and transformers drops.
        logits, gradients: what logits and log-probs may differ from transformers' by, and gradients
            for their largest number. The recurrence of delta nets amplifies rounding.
        engine: what log-probs of a served model, which is larger, may differ by.
    """

    classes: str
    sizes: dict[str, Any] = field(default_factory=lambda: {"head_dim": 8})
    experts: bool = False
    head_dim: int = 8
    kv_heads: int = 4
    served: bool = True
    engine_keys: dict[str, Any] = field(default_factory=dict)
    logits: float = 1e-5
    gradients: float = 1e-5
    engine: float = 1e-5


# Fewer key heads than value heads, of other sizes.
DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
NEAR = {"logits": 1e-4, "gradients": 3e-4, "engine": 1e-4}
INTERVAL = {"full_attention_interval": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# No rank or width is another's multiple by chance. YaRN, as SGLang has no other form of latent
# attention on CPUs; neither of its two factors is 1, nor is the model's epsilon that of the norms
# of narrow vectors.
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
    },
}
INDEXERS = {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 12}

FAMILIES = {
    "qwen2": Row("Qwen2", {}, head_dim=4),
    "qwen3": Row("Qwen3"),
    "qwen3_moe": Row("Qwen3Moe", {"head_dim": 8, "norm_topk_prob": True, **EXPERTS}, experts=True),
    "llama": Row("Llama"),
    "mistral": Row("Mistral"),
    "ministral3": Row(
        "Ministral3",
        {
            "head_dim": 8,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        engine_keys={"original_max_position_embeddings": 8},
    ),
    "glm4_moe": Row(
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
        experts=True,
    ),
    "gpt_oss": Row(
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": 3,
            "swiglu_limit": 0.7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        experts=True,
    ),
    "seed_oss": Row("SeedOss", {"head_dim": 8, "attention_bias": True}),
    "smollm3": Row("SmolLM3", {"no_rope_layer_interval": 2, "pad_token_id": None}, head_dim=4),
    "granite": Row(
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        head_dim=4,
    ),
    "gemma3_text": Row(
        "Gemma3",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "glm4": Row("Glm4", {"head_dim": 8, "pad_token_id": None}),
    "phi3": Row("Phi3", {"pad_token_id": None}, head_dim=4),
    "olmo3": Row(
        "Olmo3",
        {
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": None,
        },
        head_dim=4,
    ),
    "minimax_m2": Row(
        "MiniMaxM2",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "rotary_dim": 4,
        },
        experts=True,
        engine_keys={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
    ),
    "qwen3_next": Row(
        "Qwen3Next",
        {
            "head_dim": 8,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 16,
            **EXPERTS,
            **DELTA_NET,
        },
        experts=True,
        engine_keys=INTERVAL,
        **NEAR,
    ),
    "qwen3_5_text": Row("Qwen3_5", {"head_dim": 8, **DELTA_NET}, engine_keys=INTERVAL, **NEAR),
    "qwen3_5_moe_text": Row(
        "Qwen3_5Moe",
        {"head_dim": 8, "shared_expert_intermediate_size": 16, **EXPERTS, **DELTA_NET},
        experts=True,
        engine_keys=INTERVAL,
        **NEAR,
    ),
    "deepseek_v3": Row(
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
        experts=True,
        head_dim=20,
        kv_heads=8,
        engine_keys={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "deepseek_v2": Row(
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        experts=True,
        head_dim=20,
        kv_heads=8,
        engine_keys={
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe_lite": Row(
        "Glm4MoeLite",
        LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2},
        experts=True,
        head_dim=20,
        kv_heads=8,
        engine_keys={"first_k_dense_replace": 1},
    ),
    # All inputs are shorter than what indexers choose. The second family's layers share choices.
    "deepseek_v32": Row(
        "DeepseekV32",
        LATENT
        | INDEXERS
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        experts=True,
        head_dim=20,
        kv_heads=8,
    ),
    "glm_moe_dsa": Row(
        "GlmMoeDsa",
        LATENT
        | INDEXERS
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
        experts=True,
        head_dim=20,
        kv_heads=8,
    ),
}
WITH_EXPERTS = tuple(name for name, row in FAMILIES.items() if row.experts)
