"""What defines a model, whatever its family: its sizes, its layers and the rules of its weights.

Its layers are of the kinds in models/layers.py. A family module reads all of it from config.json
(models/registry.py); nothing else asks for the family.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch

from vapo_megatron.models.layers import (
    Activation,
    DeltaNet,
    Experts,
    GatedMlp,
    Layer,
    SoftmaxAttention,
)
from vapo_megatron.models.rotary import Rotary
from vapo_megatron.models.rules import Replicated, Rule, Vocabulary

Head = Literal["lm", "value"]


LM_HEAD = "lm_head.weight"
# The head of a value model, and of a reward model, under transformers' name for it.
SCORE_WEIGHT = "score.weight"
SCORE_BIAS = "score.bias"


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: config.json's model_type.
        classes: what transformers' class names of the family begin with.
        vocab_size: words, padding rows aside.
        tied: whether the language-model head is the word embedding.
        max_position_embeddings: longest input whose attention is as the model computes it.
        dtype: of the checkpoint, a torch dtype's name.
        layers: from input to output.
        embedding_factor: of the word embeddings where they enter the first layer.
        logits_factor: of the logits.
        zero_centred_norms: whether norms multiply by 1 + weight.
        vocab_divisible_by: Megatron's tables are padded to a multiple of this times the
            tensor-parallel size.
        value_outputs: of a value model's head: 1, or the bins of a histogram over values.
        predicts_ahead: whether layers for multi-token prediction may follow in the files, which are
            left out.
        indexed: whether the files have indexers, which choose the tokens that attention reads:
            all, up to max_position_embeddings, so that they are not needed here.
        nested: the model_type of vision-language directories that may hold it; empty: none does.
    """

    family: str
    classes: str
    hidden_size: int
    vocab_size: int
    tied: bool
    rms_norm_eps: float
    max_position_embeddings: int
    dtype: str
    # Plan looks a spec up in caches a hundred thousand times; the other fields suffice as its key.
    layers: tuple[Layer, ...] = field(repr=False, hash=False)
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    zero_centred_norms: bool = False
    vocab_divisible_by: int = 1
    value_outputs: int = 1
    predicts_ahead: bool = False
    indexed: bool = False
    nested: str = ""

    @property
    def causal_lm(self) -> str:
        """transformers' class of the policy."""
        return self.classes + "ForCausalLM"

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self.layers)

    @property
    def attention(self) -> SoftmaxAttention:
        """Softmax attention of its layers; they all have the same heads."""
        return self.softmax_attentions[0]

    @cached_property
    def experts(self) -> Experts | None:
        """The mixture of experts of the layers that have one; they are all alike. None where no
        layer has."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 in a dense model."""
        return 0 if self.experts is None else self.experts.count

    @property
    def experts_per_token(self) -> int:
        """Experts that a token goes through in such a layer."""
        return 0 if self.experts is None else self.experts.per_token

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Columns of the gated MLPs that tensor parallelism cuts: of dense layers, and of shared
        experts."""
        sizes: list[int] = []
        for layer in self.kinds:
            mlp = layer.mlp
            size = mlp.shared_size if isinstance(mlp, Experts) else mlp.size
            if size and size not in sizes:
                sizes.append(size)
        return tuple(sizes)

    @cached_property
    def kinds(self) -> Counter[Layer]:
        """Its different layers and how many there are of each, in order."""
        return Counter(self.layers)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers have the same parameters, which Megatron's checkpoints then stack."""
        return len({(layer.rules, layer.expert_rules) for layer in self.kinds}) == 1

    @property
    def dense_size(self) -> int:
        """Columns of the MLP of its dense layers; where all have experts, an expert's columns."""
        return next(
            (layer.mlp.size for layer in self.kinds if isinstance(layer.mlp, GatedMlp)),
            self.layers[0].mlp.size,
        )

    @property
    def activation(self) -> Activation:
        """Activation of its MLPs; they all have the same."""
        return self.layers[0].mlp.activation

    @property
    def rotary_kinds(self) -> set[Rotary]:
        """Its different rotary embeddings."""
        kinds = (attention.rotary for attention in self.softmax_attentions)
        return {rotary for rotary in kinds if rotary is not None}

    @property
    def softmax_attentions(self) -> list[SoftmaxAttention]:
        """Attention of its different layers, delta nets aside."""
        kinds = (layer.attention for layer in self.kinds)
        return [attention for attention in kinds if not isinstance(attention, DeltaNet)]

    @property
    def delta_nets(self) -> list[DeltaNet]:
        """Gated delta nets of its different layers."""
        kinds = (layer.attention for layer in self.kinds)
        return [attention for attention in kinds if isinstance(attention, DeltaNet)]

    @property
    def layer_rules(self) -> list[Rule]:
        """Rules of its different layers, experts included."""
        return [rule for layer in self.kinds for rule in (*layer.rules, *layer.expert_rules)]

    @property
    def attention_width(self) -> int:
        """Query channels of all layers with softmax attention together; where values are narrower,
        the mean of both."""
        return sum(
            (layer.attention.query_size + layer.attention.value_size) // 2
            for layer in self.layers
            if not isinstance(layer.attention, DeltaNet)
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype as torch's object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty_tensors(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes of tensors without an element (Layer.empty_rules)."""
        return {
            name.format(layer=index): shape
            for index, layer in enumerate(self.layers)
            for rule in layer.empty_rules
            for name, shape in zip(rule.hf, rule.hf_shapes(), strict=True)
        }

    @property
    def embedding(self) -> Rule:
        """Rule of the word embeddings."""
        return self._vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")

    @property
    def final_norm(self) -> Rule:
        """Rule of the norm before the head."""
        return Replicated(
            "decoder.final_layernorm.weight", ("model.norm.weight",), (self.hidden_size,)
        )

    @property
    def lm_head(self) -> Rule:
        """Rule of a language-model head that is not tied."""
        return self._vocabulary("output_layer.weight", LM_HEAD)

    def head_rules(self, head: Head) -> tuple[Rule, ...]:
        """Rules of the output layer's own parameters; none if a language model's is tied."""
        if head == "lm":
            return () if self.tied else (self.lm_head,)
        outputs = self.value_outputs
        return (
            Replicated("output_layer.weight", (SCORE_WEIGHT,), (outputs, self.hidden_size)),
            Replicated("output_layer.bias", (SCORE_BIAS,), (outputs,)),
        )

    def _vocabulary(self, megatron: str, name: str) -> Rule:
        shape = (self.vocab_size, self.hidden_size)
        return Vocabulary(megatron, (name,), shape, self.vocab_divisible_by)

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the word embeddings over all tensor-parallel ranks."""
        return self.vocab_shard_size(tp_size) * tp_size

    def vocab_shard_size(self, tp_size: int) -> int:
        """Rows of the word embeddings, and columns of logits, on a tensor-parallel rank."""
        return self.embedding.shard_shape(tp_size)[0]

    def parameter_count(self, head: Head = "lm") -> int:
        """Parameters of the whole model, without padding rows and tied copies."""
        return self._parameter_count(head, self.num_experts)

    def active_parameter_count(self, head: Head = "lm") -> int:
        """Parameters that a token uses: of the experts, those it is routed to."""
        return self._parameter_count(head, self.experts_per_token)

    def _parameter_count(self, head: Head, experts: int) -> int:
        outside = (self.embedding, self.final_norm, *self.head_rules(head))
        layers = sum(count * layer.parameter_count(experts) for layer, count in self.kinds.items())
        return sum(rule.count() for rule in outside) + layers

    def facts(self) -> dict[str, Any]:
        """Its numbers by name, JSON values, the layers as a text: for files, and to tell two models
        apart."""
        plain = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "layers"
        }
        kinds = [f"{count} x {layer}" for layer, count in self.kinds.items()]
        return plain | {"num_layers": self.num_layers, "layers": "; ".join(kinds)}
