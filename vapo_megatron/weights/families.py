"""The model families, by the model_type of their config.json: a table of rules each, and facts that config.json does
not state. To add a family, add a table at the end of this file and an entry in FAMILIES."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vapo_megatron.weights.rules import (
    QKV,
    ExpertGateUp,
    GateUp,
    Replicated,
    Row,
    Rule,
    Vocabulary,
)

LAYER = "model.layers.{layer}."

EMBEDDING: Rule = Vocabulary(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("vocab_size", "hidden_size")
)
FINAL_NORM: Rule = Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",))
LM_HEAD: Rule = Vocabulary("output_layer.weight", ("lm_head.weight",), ("vocab_size", "hidden_size"))
# Buffers of old versions of transformers, which carry no parameter.
IGNORED = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

# The head of a value model, and of a reward model, under transformers' name for it.
VALUE_HEAD_WEIGHT: Rule = Replicated("output_layer.weight", ("score.weight",), ("value_outputs", "hidden_size"))
VALUE_HEAD_BIAS: Rule = Replicated("output_layer.bias", ("score.bias",), ("value_outputs",))

# Parts of the families' layers.
INPUT_NORM: Rule = Replicated("input_layernorm.weight", (LAYER + "input_layernorm.weight",), ("hidden_size",))
QKV_WEIGHT: Rule = QKV(
    "self_attention.linear_qkv.weight", tuple(f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"), ("hidden_size",)
)
QKV_BIAS: Rule = QKV("self_attention.linear_qkv.bias", tuple(f"{LAYER}self_attn.{x}_proj.bias" for x in "qkv"), ())
QUERY_NORM: Rule = Replicated("self_attention.q_layernorm.weight", (LAYER + "self_attn.q_norm.weight",), ("head_dim",))
KEY_NORM: Rule = Replicated("self_attention.k_layernorm.weight", (LAYER + "self_attn.k_norm.weight",), ("head_dim",))
OUTPUT_PROJECTION: Rule = Row(
    "self_attention.linear_proj.weight", (LAYER + "self_attn.o_proj.weight",), ("hidden_size", "query_size")
)
MLP_NORM: Rule = Replicated("pre_mlp_layernorm.weight", (LAYER + "post_attention_layernorm.weight",), ("hidden_size",))
GATED_MLP: tuple[Rule, ...] = (
    GateUp(
        "mlp.linear_fc1.weight",
        (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        ("ffn_size", "hidden_size"),
    ),
    Row("mlp.linear_fc2.weight", (LAYER + "mlp.down_proj.weight",), ("hidden_size", "ffn_size")),
)
ROUTER: Rule = Replicated("mlp.router.weight", (LAYER + "mlp.gate.weight",), ("num_experts", "hidden_size"))
EXPERT = LAYER + "mlp.experts.{expert}."
GATED_EXPERT: tuple[Rule, ...] = (
    ExpertGateUp(
        "mlp.experts.linear_fc1.weight",
        (EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"),
        ("expert_ffn_size", "hidden_size"),
    ),
    Replicated("mlp.experts.linear_fc2.weight", (EXPERT + "down_proj.weight",), ("hidden_size", "expert_ffn_size")),
)


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        model_type: as config.json names it.
        classes: what transformers' class names of the family begin with.
        layer: rules of a transformer layer, relative to it, its experts' aside.
        qkv_bias, qk_norm: whether projections have biases, and queries and keys norms.
        expert: rules of each expert, where the MLP is a mixture of experts; they do not say which expert.
        defaults: what transformers assumes where config.json lacks a key.
    """

    model_type: str
    classes: str
    layer: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    expert: tuple[Rule, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def causal_lm(self) -> str:
        """transformers' class of the policy."""
        return self.classes + "ForCausalLM"

    @property
    def token_classification(self) -> str:
        """transformers' class in whose form a value model is saved: a label for each output of its head."""
        return self.classes + "ForTokenClassification"


# Qwen2 and Qwen2.5: biases on query, key and value.
QWEN2 = Family(
    model_type="qwen2",
    classes="Qwen2",
    layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
    qkv_bias=True,
)

# Qwen3, dense: norms on queries and keys, no biases, a head size of its own.
QWEN3 = Family(
    model_type="qwen3",
    classes="Qwen3",
    layer=(INPUT_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP),
    qk_norm=True,
    defaults={"head_dim": 128},
)

# Qwen3 with a mixture of experts in every layer: Qwen3's attention, a router, no shared expert.
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    classes="Qwen3Moe",
    layer=(INPUT_NORM, QKV_WEIGHT, QUERY_NORM, KEY_NORM, OUTPUT_PROJECTION, MLP_NORM, ROUTER),
    expert=GATED_EXPERT,
    qk_norm=True,
    defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
)

# Llama 2 and 3.x.
LLAMA = Family(
    model_type="llama", classes="Llama", layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT_PROJECTION, MLP_NORM, *GATED_MLP)
)

# Mistral 7B and its successors under the same model type: Llama's layers, with a sliding window in version 0.1.
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    classes="Mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": True},
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)}
