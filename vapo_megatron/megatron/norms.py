"""Norms of Megatron's layers, and norms of the outputs of attention and MLP before they
are added."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from typing_extensions import override

from vapo_megatron.megatron.sharded_parameters import cut_by_heads


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm; Megatron sums its weight gradient over tensor-parallel ranks under
    sequence parallelism, which its own WrappedTorchNorm does not support."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCentredRMSNorm(RMSNorm):
    """Multiplies by 1 + weight, in float32: 1 + weight itself would lose the weight's digits in
    bfloat16."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


class AllHeadsRMSNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of a token (OLMo 2, MiniMax-M2). A tensor-parallel rank
    has its heads' part of the weight; the mean square is over all ranks' heads."""

    def __init__(
        self, hidden_size: int, config: Any, eps: float, heads: int, tp_group: Any
    ) -> None:
        """hidden_size: channels of a head. heads: over all ranks."""
        super().__init__()
        self.channels = heads * hidden_size
        self.eps = eps
        self.tp_group = tp_group
        part = self.channels // tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(part, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """x [t, b, heads of this rank, channels] -> the same shape."""
        flat = x.flatten(-2)
        total = flat.float().square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            # Each rank's loss depends on all ranks' squares: the sum is summed in backward, too.
            total = copy_to_tensor_model_parallel_region(total, group=self.tp_group)
            total = reduce_from_tensor_model_parallel_region(total, group=self.tp_group)
        scaled = flat.float() * torch.rsqrt(total / self.channels + self.eps)
        return (self.weight * scaled.to(x.dtype)).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For megatron.core.dist_checkpointing."""
        own = self.state_dict(prefix="", keep_vars=True)
        return cut_by_heads(own, prefix, sharded_offsets, metadata, self.tp_group)


class AddToResidual(torch.nn.Module):
    """Adds the output of attention or MLP to the residual stream, after a norm or times a factor.

    It takes the place of Megatron's bias-dropout-add, so that the layer and its forward pass stay
    Megatron's.
    """

    def __init__(self, config: Any, norm: type | None, factor: float) -> None:
        """norm: class of the norm of the output; None: it has none."""
        super().__init__()
        self.factor = factor
        self.norm = (
            None if norm is None else norm(config, config.hidden_size, config.layernorm_epsilon)
        )

    @override
    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """As Megatron calls it; returns what adds."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        output, bias = output_with_bias
        if bias is not None:
            output = output + bias
        if self.norm is not None:
            output = self.norm(output)
        if self.factor != 1.0:
            output = output * self.factor
        return residual + output
