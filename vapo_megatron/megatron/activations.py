"""Activations of gated MLPs, on one tensor that holds gate and up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.models.layers import Activation, ClampedSwiGLU


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x, activated), (grad,) = ctx.saved_tensors, grads
        gate, up = x.chunk(2, -1)
        gradient = torch.empty_like(x)
        of_gate, of_up = gradient.chunk(2, -1)
        torch.mul(grad, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return gradient


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x [..., 2 * n], gate first -> [..., n] (Shazeer 2020, eq. 6)."""
    activated: Tensor = _SwiGLU.apply(x)
    return activated


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) * up of x [..., 2 * n], gate first, gelu in its tanh form -> [..., n]."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.numbers = (alpha, limit)
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        alpha, limit = ctx.numbers
        gate, up = x.chunk(2, -1)
        gradient = torch.empty_like(x)
        of_gate, of_up = gradient.chunk(2, -1)
        clamped = gate.clamp(max=limit)
        share = torch.sigmoid(alpha * clamped)
        slope = share * (1 + alpha * clamped * (1 - share)) * (gate <= limit)
        torch.mul(grad * (up.clamp(-limit, limit) + 1), slope, out=of_gate)
        torch.mul(grad * clamped * share, up.abs() <= limit, out=of_up)
        return gradient, None, None


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """ClampedSwiGLU (models/layers.py) of x [..., 2 * n], gate first -> [..., n], as in
    transformers' GptOssExperts."""
    activated: Tensor = _ClampedSwiGLU.apply(x, alpha, limit)
    return activated


_GATED: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}
# Megatron's fused product of F.gelu is the tanh form (fusions/fused_bias_geglu.py).
_PLAIN: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": F.gelu}


def gated(activation: Activation) -> Callable[[Tensor], Tensor]:
    """An activation of gate and up in one tensor, for local layers."""
    if isinstance(activation, ClampedSwiGLU):
        return partial(clamped_swiglu, alpha=activation.alpha, limit=activation.limit)
    return _GATED[activation]


def plain(activation: Activation) -> Callable[[Tensor], Tensor]:
    """An activation of the gate alone, for Megatron's config, which takes no others. Local layers
    do not call it."""
    return F.silu if isinstance(activation, ClampedSwiGLU) else _PLAIN[activation]
