"""What a rank holds of a model: the parameters of its pipeline stage and tensor-parallel part."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from vapo_megatron.config.model import AdapterConfig, LayoutConfig
from vapo_megatron.megatron.mesh import stage_pieces
from vapo_megatron.models.layers import Layer
from vapo_megatron.models.rules import Rule
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import adapter_entries


@dataclass(frozen=True)
class Shard:
    """Parameters of a rank of one pipeline stage, padding rows of the vocabulary and a tied head's
    copy included.

    Attributes:
        dense: parameters that all data- and context-parallel ranks hold alike.
        expert: expert parameters, which the ranks of the stage share out.
    """

    dense: int
    expert: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.expert


@cache
def shard(spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int) -> Shard:
    """The shard on a rank of pipeline stage `stage`, for a layout that divides the model."""
    outside: list[Rule] = []
    if stage == layout.pp - 1:
        outside += [spec.final_norm, *spec.head_rules(head)]
    # Megatron keeps a copy of a tied embedding where the head is not on the embedding's rank.
    if stage == 0 or (outside and head == "lm" and spec.tied):
        outside.append(spec.embedding)
    dense = _held(outside, layout.tp)
    experts = 0
    for layer, count in layers_of(spec, layout, stage).items():
        dense += count * _held(layer.rules, layout.tp)
        experts += count * (layer.experts // layout.ep) * _held(layer.expert_rules, layout.tp)
    return Shard(dense, experts)


@cache
def adapter_shard(
    spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int, config: AdapterConfig
) -> Shard:
    """The trained part of such a shard in a model with adapters: these, and a critic's head."""
    if head == "value" and stage == layout.pp - 1:
        outside = spec.head_rules(head)
    else:
        outside = ()
    dense = _held(outside, layout.tp)
    experts = 0
    for layer, count in layers_of(spec, layout, stage).items():
        # The adapters of all experts are alike: the first one stands for all.
        first = replace(spec, layers=(layer,))
        halves = [half for half in adapter_entries(first, config) if not half.expert]
        dense += count * _held((half.rule for half in halves if half.expert is None), layout.tp)
        expert = _held((half.rule for half in halves if half.expert == 0), layout.tp)
        experts += count * (layer.experts // layout.ep) * expert
    return Shard(dense, experts)


@cache
def layers_of(spec: ModelSpec, layout: LayoutConfig, stage: int) -> Counter[Layer]:
    """The different layers of a pipeline stage and how many of each there are."""
    return Counter(
        spec.layers[index]
        for piece in stage_pieces(spec, layout)[stage :: layout.pp]
        for index in piece
    )


def _held(rules: Iterable[Rule], tp_size: int) -> int:
    return sum(math.prod(rule.shard_shape(tp_size)) for rule in rules)
