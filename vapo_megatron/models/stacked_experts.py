"""Rules of experts that files keep in one tensor for all of them (gpt-oss), and such a mixture's
rules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vapo_megatron.models.layers import Experts
from vapo_megatron.models.rules import Replicated, Rule, SliceableTensor


@dataclass(frozen=True)
class Stacked(Replicated):
    """An expert's part of a tensor of all experts: of weights [experts, in, out], of biases
    [experts, out]. Megatron has [out, in].

    Attributes:
        shape: of an expert's part.
        experts: first dimension of the tensor.
        alternating: whether the columns of gate and up alternate; Megatron has gate before up.
    """

    experts: int
    alternating: bool = False

    @property
    @override
    def is_linear(self) -> bool:
        """No: neither adapters nor FP8 know such a tensor."""
        return False

    @override
    def file_shapes(self) -> list[tuple[int, ...]]:
        return [(self.experts, *self.shape)]

    @override
    def of_expert(self, tensor: Any, expert: int | None) -> Any:
        return tensor[expert]

    @override
    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return self.shape[::-1]

    @override
    def count(self) -> int:
        """Parameters of one expert."""
        return math.prod(self.shape)

    @override
    def to_shard(self, sources: Sequence[SliceableTensor], tp_rank: int, tp_size: int) -> Tensor:
        part = sources[0][...]
        if self.alternating:
            part = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
        return part.t()

    @override
    def place(self, shard: Tensor, wholes: Sequence[Tensor], tp_rank: int, tp_size: int) -> None:
        if tp_rank > 0:
            return
        part = shard.t()
        if not self.alternating:
            wholes[0].copy_(part)
            return
        gate, up = part.chunk(2, dim=-1)
        wholes[0][..., 0::2].copy_(gate)
        wholes[0][..., 1::2].copy_(up)


def stacked_experts(hidden_size: int, experts: Experts, prefix: str) -> tuple[Rule, ...]:
    """Rules of each expert of a mixture with biases, gate and up alternating."""

    def rule(megatron: str, name: str, shape: tuple[int, ...], alternating: bool) -> Rule:
        return Stacked(
            f"mlp.experts.{megatron}", (prefix + name,), shape, experts.count, alternating
        )

    columns = 2 * experts.size
    return (
        rule("linear_fc1.weight", "gate_up_proj", (hidden_size, columns), True),
        rule("linear_fc1.bias", "gate_up_proj_bias", (columns,), True),
        rule("linear_fc2.weight", "down_proj", (experts.size, hidden_size), False),
        rule("linear_fc2.bias", "down_proj_bias", (hidden_size,), False),
    )
