"""Random shapes of every family: other numbers of heads, odd vocabularies, tied words, other rotary
embeddings, layers, experts and windows than those of family_table.py."""

from random import Random
from typing import Any

from family_table import FAMILIES

# Grouped products on CPUs want rows of 16 bytes: widths of experts are multiples of 4.
WIDTHS = (20, 36, 48, 64)
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WINDOWS = ("gemma3_text", "olmo3", "gpt_oss")
# Of these a rotary embedding may be scaled, and all channels of a head are turned.
SCALED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "seed_oss",
    "granite",
    "smollm3",
    "olmo3",
    "gemma3_text",
)
# Of these a part of each head is turned, which YaRN then stretches alone.
PARTIAL = ("glm4", "glm4_moe", "minimax_m2", *DELTA_NETS)
NUMBER_OF_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def variant(family: str, rng: Random) -> dict[str, Any]:
    """Keys of config.json over those of the family's row."""
    row = FAMILIES[family].sizes
    sizes = _sizes(family, row, rng)
    layers: int = sizes["num_hidden_layers"]
    if "kv_lora_rank" in row:
        sizes |= _latent(family, row, layers, rng)
    if any(key in row for key in NUMBER_OF_EXPERTS):
        sizes |= _experts(family, row, rng)
    if family == "glm4_moe":
        sizes |= {
            "n_shared_experts": rng.choice((1, 2)),
            "first_k_dense_replace": rng.randrange(layers),
            "use_qk_norm": rng.random() < 0.5,
            "attention_bias": rng.random() < 0.5,
        }
    if family in WINDOWS:
        kinds = ("sliding_attention", "full_attention")
        sizes["layer_types"] = rng.choices(kinds, k=layers)
        sizes["sliding_window"] = rng.choice((1, 2, 5, 40))
    if family in DELTA_NETS:
        sizes |= _delta_net(layers, rng)
    if family == "smollm3":
        sizes["no_rope_layer_interval"] = rng.choice((2, 3, 4))
    if family == "minimax_m2":
        sizes["rotary_dim"] = rng.choice((2, 4, sizes["head_dim"]))
    if family == "glm4":
        sizes["partial_rotary_factor"] = rng.choice((0.5, 1.0))
    if family in SCALED:
        sizes |= _rotary(family, rng)
    if family in PARTIAL and rng.random() < 0.5:
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": rng.choice((2.0, 4.0))}
        sizes["rope_parameters"] = yarn | {"original_max_position_embeddings": 16}
    if family == "phi3" and rng.random() < 0.7:
        sizes |= _long_rope(sizes["hidden_size"] // sizes["num_attention_heads"], rng)
    return sizes


def _sizes(family: str, row: dict[str, Any], rng: Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12))
    # A quarter of a head is turned in families with delta nets.
    head_dim = rng.choice((8, 16, 24) if family in DELTA_NETS else (4, 8, 12, 16))
    kv_heads = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    hidden = heads * head_dim
    if "head_dim" in row and family != "gemma3_text":
        hidden = rng.choice((hidden, 24, 40, 48, 56))
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in row else kv_heads,
        "hidden_size": hidden,
        "intermediate_size": rng.choice(WIDTHS),
        "vocab_size": rng.choice((97, 100, 128, 131, 250, 257)),
        "num_hidden_layers": rng.choice((1, 2, 3, 4, 5, 6)),
        "tie_word_embeddings": rng.random() < 0.4,
        "max_position_embeddings": 64,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
    }
    if "head_dim" in row:
        sizes["head_dim"] = head_dim
    return sizes


def _latent(family: str, row: dict[str, Any], layers: int, rng: Random) -> dict[str, Any]:
    turned = rng.choice((4, 8, 10))
    dense_layers = rng.randrange(layers)
    sizes: dict[str, Any] = {
        "kv_lora_rank": rng.choice((12, 20)),
        "qk_nope_head_dim": rng.choice((6, 8, 12)),
        "qk_rope_head_dim": turned,
        "v_head_dim": rng.choice((4, 12, 24)),
        "n_shared_experts": rng.choice((1, 2, 3)),
        "first_k_dense_replace": dense_layers,
    }
    if row["q_lora_rank"] is not None:
        sizes["q_lora_rank"] = rng.choice((10, 16, 24))
    if family == "glm4_moe_lite":
        kinds = ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers)
        sizes["mlp_layer_types"] = kinds
    if "index_topk" in row:
        sizes["index_n_heads"] = rng.choice((1, 2, 5))
        sizes["index_head_dim"] = turned + rng.choice((0, 4, 6))
    if "indexer_types" in row:
        others = rng.choices(("full", "shared"), k=layers - 1)
        sizes["indexer_types"] = ["full", *others]
    return sizes


def _experts(family: str, row: dict[str, Any], rng: Random) -> dict[str, Any]:
    (key,) = (key for key in NUMBER_OF_EXPERTS if key in row)
    count = rng.choice((2, 3, 4, 6, 8))
    sizes: dict[str, Any] = {
        key: count,
        "num_experts_per_tok": rng.choice([n for n in (2, 3, 4) if n <= count]),
    }
    if "moe_intermediate_size" in row:
        sizes["moe_intermediate_size"] = rng.choice((12, 24))
    if "shared_expert_intermediate_size" in row:
        sizes["shared_expert_intermediate_size"] = rng.choice((8, 16, 20))
    if "norm_topk_prob" in row:
        sizes["norm_topk_prob"] = rng.random() < 0.6
    if "n_group" in row:
        sizes |= {"n_group": 1, "topk_group": 1}
        if family == "deepseek_v3" and count in (4, 6, 8):
            sizes |= {"n_group": 2, "num_experts_per_tok": 2}
    return sizes


def _delta_net(layers: int, rng: Random) -> dict[str, Any]:
    key_heads = rng.choice((1, 2, 3))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((4, 6)),
        "linear_value_head_dim": rng.choice((4, 10)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        "layer_types": [
            *rng.choices(("linear_attention", "full_attention"), k=layers - 1),
            "full_attention",
        ],
    }


def _rotary(family: str, rng: Random) -> dict[str, Any]:
    kind = rng.choice(("default", "linear", "llama3", "yarn"))
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((1e4, 5e5))}
    if kind != "default":
        parameters["factor"] = rng.choice((2.0, 4.0))
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = 16
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if family in ("gemma3_text", "olmo3"):  # a table for each kind of layer
        plain = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
        parameters = {"full_attention": parameters, "sliding_attention": plain}
    return {"rope_parameters": parameters}


def _long_rope(head_dim: int, rng: Random) -> dict[str, Any]:
    """For inputs that are not longer than the original context."""
    share = rng.choice((0.5, 1.0))
    pairs = int(head_dim * share) // 2
    short, long = ([rng.uniform(1.0, most) for _ in range(pairs)] for most in (2.0, 8.0))
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": share}
    parameters |= {"short_factor": short, "long_factor": long}
    return {"original_max_position_embeddings": 32, "rope_parameters": parameters}
