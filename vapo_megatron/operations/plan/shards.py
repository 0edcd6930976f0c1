"""How many parameters a rank holds, from the same tables of rules that its weights are loaded by."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from vapo_megatron.config.model import LayoutConfig
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


def shard(spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int) -> Shard:
    """What a rank of pipeline stage `stage` holds under a layout that divides the model."""
    table, layers = spec.table, spec.num_layers // layout.pp
    first, last = stage == 0, stage == layout.pp - 1
    outside: list[Rule] = []
    if first:
        outside.append(table.embedding)
    if last:
        outside += [table.final_norm, *spec.head_rules(head)]
    if last and not first and head == "lm" and spec.tied:
        outside.append(table.embedding)  # Megatron keeps a copy where the head is not on the embedding's rank
    dense = layers * _held(table.layer, spec, layout.tp) + _held(outside, spec, layout.tp)
    experts = layers * (spec.num_experts // layout.ep) * _held(table.expert, spec, layout.tp)
    return Shard(dense, experts)


def _held(rules: Iterable[Rule], spec: ModelSpec, tp_size: int) -> int:
    return sum(math.prod(rule.shard_shape(spec, tp_size)) for rule in rules)
