"""What defines a model, whatever its family: its sizes, its layers and the rules of its weights.

A layer is attention and an MLP, each of a kind: a dataclass with the numbers of that kind.
Megatron's side builds a layer from its kinds (megatron/layer_spec.py), the plan counts them, and
nothing else asks for the family. A family module reads them from config.json (models/registry.py).
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from vapo_megatron.models.rotary import Rotary
from vapo_megatron.models.rules import Replicated, Rule, Vocabulary

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and an up between
    -limit and limit (gpt-oss)."""

    alpha: float
    limit: float


Activation: TypeAlias = Literal["silu", "gelu_tanh"] | ClampedSwiGLU

LM_HEAD = "lm_head.weight"
# The head of a value model, and of a reward model, under transformers' name for it.
SCORE_WEIGHT = "score.weight"
SCORE_BIAS = "score.bias"
# Attention with sinks adds channels in multiples of this many, as fast kernels want them
# (megatron/attention.py).
SINK_CHANNELS = 8


@dataclass(frozen=True)
class SelfAttention:
    """Softmax attention of grouped queries.

    Attributes:
        num_heads, num_kv_heads, head_dim: queries, key-value groups, channels of each.
        rotary: of queries and keys; None: positions are not encoded.
        scale: of the scores; None: 1 / sqrt(head_dim), times YaRN's factor.
        window: keys that a query sees, its own included; None: its whole past.
        qkv_bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the output projection has one.
        sinks: whether each head has a learnt score that takes part in the softmax, without a value.
        qk_norm: whether queries and keys have norms, of each head or of all heads of a token
            together.
        gated: whether the output is multiplied by the sigmoid of a gate, which the query projection
            has beside each query.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary | None
    scale: float | None = None
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    output_bias: bool = False
    sinks: bool = False
    gated: bool = False

    @property
    def query_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, or values, of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of what all heads of a token put out."""
        return self.query_size

    def cached_size(self, tp_size: int) -> float:
        """Numbers of a token in an engine's cache on a rank; heads fewer than ranks are copied."""
        return 2 * max(1.0, self.num_kv_heads / tp_size) * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores."""
        if self.scale is not None:
            return self.scale
        stretch = 1.0 if self.rotary is None else self.rotary.score_factor
        return stretch * self.head_dim**-0.5


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464): a causal convolution over a few tokens, then a state of
    each value head that decays and is corrected at every token. Positions are not encoded.

    Attributes:
        key_heads, value_heads: heads of queries and keys, and of values: a multiple of the first,
            as each key head serves so many value heads one after another.
        key_dim, value_dim: channels of a head.
        kernel: tokens that the convolution sees, its own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_size(self) -> int:
        """Width of all keys, or queries, of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_size(self) -> int:
        """Numbers in the states of a sequence."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class LatentAttention:
    """Softmax attention whose keys and values are made of one narrow vector a token (Multi-head
    Latent Attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        num_heads: queries, and keys and values.
        plain_dim: channels of a query or key that are not turned.
        value_dim: channels of a value.
        query_rank: width of the vector that queries are made of; None: the hidden state.
        kv_rank: width of the vector that keys and values are made of.
        rotary: of the further channels of queries and keys, all of which it turns; the keys'
            are the same in all heads.
        softmax_scale: of the scores.
        turned_factor: of turned queries and of turned keys.
        norm_eps: of the norms of the narrow vectors, independent of the model's norm_eps.
    """

    num_heads: int
    plain_dim: int
    value_dim: int
    query_rank: int | None
    kv_rank: int
    rotary: Rotary
    softmax_scale: float
    turned_factor: float = 1.0
    norm_eps: float = 1e-6

    # What SelfAttention may have and this has not.
    window: ClassVar[None] = None
    qkv_bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    qk_norm: ClassVar[None] = None
    gated: ClassVar[bool] = False

    @property
    def num_kv_heads(self) -> int:
        """Each head has its own key and value."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a query, or key."""
        return self.plain_dim + self.rotary.channels

    @property
    def query_size(self) -> int:
        """Width of all queries of a token, or keys."""
        return self.num_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of all values of a token."""
        return self.num_heads * self.value_dim

    @property
    def kv_size(self) -> float:
        """Width of all keys, or values, of a token: the mean of the two."""
        return (self.query_size + self.value_size) / 2

    def cached_size(self, tp_size: int) -> float:
        """Numbers of a token in an engine's cache on a rank: the narrow vector and the turned
        channels, whatever the number of ranks."""
        return float(self.kv_rank + self.rotary.channels)


@dataclass(frozen=True)
class GatedMlp:
    """activation(gate) * up, then down. size: columns of gate and of up."""

    size: int
    activation: Activation = "silu"

    @property
    def active_size(self) -> int:
        """Columns that a token goes through."""
        return self.size


@dataclass(frozen=True)
class Experts:
    """A mixture of gated MLPs.

    Attributes:
        count, per_token: experts, and how many of them a token goes through.
        size: columns of an expert's gate and of its up.
        scores: what turns the router's logits into weights.
        normalised: whether a token's weights are scaled to sum to 1.
        factor: of the weights after that.
        bias: whether each expert has a number by which it is chosen, but not weighted: float32,
            never trained.
        groups, groups_per_token: experts are chosen within this many groups of as many; 1: among
            all.
        shared_size: columns of the gated MLP that all tokens go through beside their experts; 0:
            none.
        shared_gate: whether its output is multiplied by a learned sigmoid.
        linear_biases: whether the router's and the experts' linear layers have biases.
    """

    count: int
    per_token: int
    size: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = False
    factor: float = 1.0
    bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    activation: Activation = "silu"
    linear_biases: bool = False

    @property
    def active_size(self) -> int:
        """Columns that a token goes through, of its experts and of what all tokens share."""
        return self.per_token * self.size + self.shared_size


SoftmaxAttention: TypeAlias = SelfAttention | LatentAttention
AttentionKind: TypeAlias = SoftmaxAttention | DeltaNet
MlpKind: TypeAlias = GatedMlp | Experts


@dataclass(frozen=True)
class Layer:
    """A transformer layer.

    Attributes:
        attention, mlp: their kinds.
        rules: of its weights, experts excluded; names are relative to the layer.
        expert_rules: of each expert; they do not say which.
        empty_rules: of tensors without an element, which files have of an MLP without columns, and
            Megatron has not.
        norm_before, norm_after: whether attention and MLP have a norm before, and one after.
        residual_factor: of the outputs of attention and MLP where they are added.
    """

    attention: AttentionKind
    mlp: MlpKind
    rules: tuple[Rule, ...] = field(repr=False, hash=False)
    expert_rules: tuple[Rule, ...] = field(default=(), repr=False, hash=False)
    empty_rules: tuple[Rule, ...] = field(default=(), repr=False, hash=False)
    norm_before: bool = True
    norm_after: bool = False
    residual_factor: float = 1.0

    @property
    def experts(self) -> int:
        """Experts of its MLP; 0 where it is dense."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0

    def parameter_count(self, experts: int) -> int:
        """Parameters with so many of its experts."""
        shared = sum(rule.count() for rule in self.rules)
        return shared + experts * sum(rule.count() for rule in self.expert_rules)


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
    nested: str = ""

    @property
    def causal_lm(self) -> str:
        """transformers' class of the policy."""
        return self.classes + "ForCausalLM"

    @property
    def token_classification(self) -> str:
        """transformers' class in whose form a value model is saved: a label for each output of its
        head."""
        return self.classes + "ForTokenClassification"

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
