"""What a model family is: a table of rules and the few facts that config.json leaves unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vapo_megatron.weights.rules import QKV, ExpertGateUp, GateUp, Replicated, Row, Rule, Vocabulary

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

# What the families' layers are made of.
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
        layer: rules of a transformer layer, their `megatron` names relative to it; ModelSpec.layer_rules says which of
            them a model has.
        dense_layer: those of the first layers of a model with experts, where these have none.
        expert: rules of each expert of a layer, where the MLP is a mixture of experts; their `megatron` names do not
            say which expert.
        qkv_bias: whether query, key and value projections have biases; None: config.json says, by attention_bias.
        qk_norm: whether queries and keys are normalised by head; None: config.json says, by use_qk_norm.
        sigmoid_router: whether experts are chosen by the sigmoid of their score and a bias of each, not by softmax.
        partial_rotary: whether the rotary embedding may turn a part of a head's channels.
        predicts_ahead: whether layers for the prediction of further tokens (MTP) may follow in the files, which are
            left out.
        defaults: what transformers assumes where config.json lacks a key.
    """

    model_type: str
    classes: str
    layer: tuple[Rule, ...]
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
    expert: tuple[Rule, ...] = ()
    dense_layer: tuple[Rule, ...] = ()
    sigmoid_router: bool = False
    partial_rotary: bool = False
    predicts_ahead: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def causal_lm(self) -> str:
        """transformers' class of the policy."""
        return self.classes + "ForCausalLM"

    @property
    def token_classification(self) -> str:
        """transformers' class in whose form a value model is saved: a label for each output of its head."""
        return self.classes + "ForTokenClassification"
