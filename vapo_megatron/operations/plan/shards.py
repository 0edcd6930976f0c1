"""How many parameters a rank holds, from the same tables of rules that its weights are loaded by."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.weights.families.family import EMBEDDING, FINAL_NORM
from vapo_megatron.weights.rules import Rule
from vapo_megatron.weights.spec import Head, ModelSpec


@dataclass(frozen=True)
class Shard:
    """What a rank of one pipeline stage holds.

    Attributes:
        dense: parameters that all data- and context-parallel ranks hold alike, padding rows of the vocabulary and a
            tied head's copy included.
        expert: parameters of experts, which the ranks of the stage share out.
    """

    dense: int
    expert: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.expert


@cache
def shard(spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int) -> Shard:
    """What a rank of pipeline stage `stage` holds under a layout that divides the model."""
    chunks = layout.pp * (layout.vpp or 1)
    layers = [layer for layer in range(spec.num_layers) if layer * chunks // spec.num_layers % layout.pp == stage]
    first_kind = sum(layer < spec.dense_layers for layer in layers)
    first, last = stage == 0, stage == layout.pp - 1
    outside: list[Rule] = []
    if first:
        outside.append(EMBEDDING)
    if last:
        outside += [FINAL_NORM, *spec.head_rules(head)]
    if last and not first and head == "lm" and spec.tied:
        outside.append(EMBEDDING)  # Megatron keeps a copy where the head is not on the embedding's rank
    counts = first_kind, len(layers) - first_kind
    dense = sum(n * _held(rules, spec, layout.tp) for n, (_, rules) in zip(counts, spec.layer_kinds, strict=True))
    experts = counts[1] * (spec.num_experts // layout.ep) * _held(spec.table.expert, spec, layout.tp)
    return Shard(dense + _held(outside, spec, layout.tp), experts)


def _held(rules: Iterable[Rule], spec: ModelSpec, tp_size: int) -> int:
    return sum(math.prod(rule.shard_shape(spec, tp_size)) for rule in rules)
