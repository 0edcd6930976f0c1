"""The gated activation of layers without Transformer Engine.

Megatron's own, written for any gate, makes five tensors of the width of the MLP forward and as many backward; on a CPU
that costs a tenth of a training step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


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
        found = torch.empty_like(x)
        of_gate, of_up = found.chunk(2, -1)
        torch.mul(grad, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return found


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x [..., 2 * n], gate first -> [..., n] (Shazeer 2020, eq. 6)."""
    found: Tensor = _SwiGLU.apply(x)
    return found


def install_swiglu(model: torch.nn.Module) -> None:
    """Give a built model's MLPs, experts too, this activation. Their config must have use_te_activation_func, by which
    Megatron means that an MLP's activation takes the gate and what it gates in one tensor."""
    for module in model.modules():
        if isinstance(module, MLP):
            module.activation_func = swiglu
