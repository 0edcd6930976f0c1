"""Operations of a model, a multiplication and an addition counted as two."""

import math
from dataclasses import dataclass
from functools import cache

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig
from vapo_megatron.weights.rules import Rule
from vapo_megatron.weights.spec import Head, ModelSpec


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass over some tokens, by what they are spent on."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.linear + self.attention + self.head


def _matrix(rule: Rule, spec: ModelSpec) -> int:
    """Weights of a rule that are multiplied with every token: matrices, not biases and norms."""
    return sum(math.prod(shape) for shape in rule.hf_shapes(spec) if len(shape) > 1)


def matrix_parameters(spec: ModelSpec) -> int:
    """Weights of all layers that a token is multiplied with, of the experts those it is routed to.

    Embedding and head are not among them.
    """
    return _matrices(spec, "")


@cache
def _matrices(spec: ModelSpec, part: str) -> int:
    """Those of a part of the layers, by how its Megatron names begin; experts begin with "mlp."."""
    layers = sum(
        count * _matrix(rule, spec)
        for count, rules in spec.layer_kinds
        for rule in rules
        if rule.megatron.startswith(part)
    )
    expert = sum(_matrix(rule, spec) for rule in spec.table.expert)
    return layers + (spec.num_layers - spec.dense_layers) * spec.experts_per_token * expert


def forward_flops(spec: ModelSpec, head: Head, tokens: float, squares: float, head_tokens: float) -> Flops:
    """One forward pass.

    Args:
        spec: the model.
        head: "lm" computes logits, "value" n numbers a token.
        tokens: of all sequences together.
        squares: sum over sequences of their squared tokens; a causal token attends to half of its sequence.
        head_tokens: positions that the head is computed for.
    """
    outputs = spec.vocab_size if head == "lm" else spec.value_outputs
    return Flops(
        linear=2.0 * matrix_parameters(spec) * tokens,
        # Scores and weighted values, 2 * n^2 * query_size operations each, of which causality leaves half.
        attention=2.0 * spec.num_layers * spec.query_size * squares,
        head=2.0 * spec.hidden_size * outputs * head_tokens,
    )


# Backward costs twice the forward pass; the fused attention kernels compute the scores once more (Dao 2023,
# FlashAttention-2, section 3.1: 2.5), and the head computes its logits again.
BACKWARD = {"linear": 2.0, "attention": 2.5, "head": 3.0}


def training_flops(spec: ModelSpec, forward: Flops, layout: LayoutConfig, recompute: RecomputeConfig) -> Flops:
    """Operations of forward and backward pass, what is computed again included."""
    linear, attention = _computed_again(spec, layout, recompute)
    return Flops(
        forward.linear * (1 + BACKWARD["linear"] + linear),
        forward.attention * (1 + BACKWARD["attention"] + attention),
        forward.head * (1 + BACKWARD["head"]),
    )


def _computed_again(spec: ModelSpec, layout: LayoutConfig, recompute: RecomputeConfig) -> tuple[float, float]:
    """Shares of the layers' linear operations and of attention that backward computes again."""
    if recompute.granularity == "none":
        return 0.0, 0.0
    if recompute.granularity == "full":
        share = 1.0
        if recompute.method == "block":
            share = min(1.0, recompute.layers / (spec.num_layers // layout.pp // (layout.vpp or 1)))
        return share, share
    linear = mlp_share(spec) if {"mlp", "moe"} & set(recompute.modules) else 0.0
    return linear, 1.0 if "core_attn" in recompute.modules else 0.0


def mlp_share(spec: ModelSpec) -> float:
    """The MLP's, or the experts', share of a layer's matrix weights."""
    return _matrices(spec, "mlp.") / matrix_parameters(spec)
