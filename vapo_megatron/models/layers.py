"""Layers of a model: attention and an MLP, each of a kind, a dataclass with the numbers of that
kind.

Megatron's side builds a layer from its kinds (megatron/layer_spec.py), and the plan counts them.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

from vapo_megatron.models.rotary import Rotary
from vapo_megatron.models.rules import Rule


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit`, and an up between
    -limit and limit (gpt-oss)."""

    alpha: float
    limit: float


Activation: TypeAlias = Literal["silu", "gelu_tanh"] | ClampedSwiGLU
# Attention with sinks adds channels in multiples of this many, as fast kernels want them
# (megatron/packed_attention.py).
SINK_CHANNELS = 8


@dataclass(frozen=True)
class SelfAttention:
    """Softmax attention of grouped queries.

    Attributes:
        num_heads, num_kv_heads, head_dim: queries, key-value groups, channels of each.
        rotary: of queries and keys; None: positions are not encoded.
        scale: of the scores, which a stretch of queries and keys multiplies; None: 1 /
            sqrt(head_dim).
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
    def turned_factor(self) -> float:
        """Factor of turned queries and of turned keys, where a head has further channels."""
        if self.rotary is None or self.rotary.channels == self.head_dim:
            return 1.0
        return self.rotary.stretch

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores, with the factors of queries and keys that are turned as a whole."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        stretch = 1.0 if self.rotary is None else self.rotary.stretch / self.turned_factor
        return stretch**2 * scale


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
        shared, expert = self._counts
        return shared + experts * expert

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """Parameters without experts, and of an expert. `plan` asks for them a million times."""
        shared = sum(rule.count() for rule in self.rules)
        return shared, sum(rule.count() for rule in self.expert_rules)
