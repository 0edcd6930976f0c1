"""Layers of experts whose weights one grouped layer holds, as Transformer Engine's do, on a machine
without a GPU.

Megatron's own TEGroupedMLP is used with a grouped layer of the same names, arguments and
parameters.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from vapo_megatron.megatron import model
from vapo_megatron.megatron.activations import swiglu


class GroupedLinear(torch.nn.Module):
    """What TEGroupedMLP takes for a linear layer: weight0, weight1, ... of its experts."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.experts = experts
        for number in range(experts):
            self.register_parameter(
                f"weight{number}",
                torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype)),
            )

    def forward(self, x: Tensor, tokens: Sequence[int]) -> tuple[Tensor, None]:
        parts = enumerate(x.split(list(tokens)))
        return torch.cat(
            [F.linear(part, getattr(self, f"weight{number}")) for number, part in parts]
        ), None


class GroupedExperts(TEGroupedMLP):
    """On a GPU its activation is one of Transformer Engine's kernels."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.activation_func = swiglu


def use_grouped_layers() -> None:
    """Have this process build models with such layers."""
    local_spec = model.layer_spec

    def grouped_spec(layer: Any, *arguments: Any, **settings: Any) -> Any:
        spec = local_spec(layer, *arguments, **settings)
        if not layer.experts:
            return spec
        linears = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        mlp = spec.submodules.mlp
        if isinstance(mlp, partial):  # from Megatron-Core 0.17 on
            mlp.keywords["submodules"].experts = partial(GroupedExperts, submodules=linears)
        else:
            mlp.submodules.experts = ModuleSpec(module=GroupedExperts, submodules=linears)
        return spec

    model.layer_spec = grouped_spec
