"""Rotary position embedding of packed sequences (Su et al. 2021, eq. 34), for layers without Transformer Engine.

Megatron's own makes the cosines of every sequence anew for queries and keys of every layer; these are made once for a
micro-batch.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.zigzag import local_positions


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = 2 * cos.shape[-1]
    found[..., turned:] = x[..., turned:]
    (real, imaginary), (of_real, of_imaginary) = x[..., :turned].chunk(2, -1), found[..., :turned].chunk(2, -1)
    torch.mul(real, cos, out=of_real).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=of_imaginary).addcmul_(real, sin, value=sign)
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [t, heads, d], whose halves are real and imaginary parts, by angles given as cos and sin [t, 1, d / 2].

    Where they are fewer, the first channels alone are turned."""
    found: Tensor = _Rotate.apply(x, cos, sin)
    return found


class RotaryTables:
    """Cosines and sines of the positions that a context-parallel rank holds, shared by the layers of a model."""

    def __init__(self, inv_freq: Tensor, cp_size: int, cp_rank: int) -> None:
        """inv_freq: float32 [d / 2], angle between neighbouring positions."""
        self._inv_freq, self._cp = inv_freq, (cp_size, cp_rank)
        self._key: weakref.ref[Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, cu_seqlens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [t, 1, d / 2] in dtype, where cu_seqlens [sequences + 1] lies; those of the last call where it is the
        same tensor, which nobody must change."""
        known = self._key() if self._key is not None else None
        if known is not cu_seqlens or self._tables is None or self._tables[0].dtype != dtype:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            positions = torch.cat([torch.arange(n) for n in lengths])[local_positions(lengths, *self._cp)]
            angles = torch.outer(positions.float(), self._inv_freq)[:, None]
            device = cu_seqlens.device
            self._tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
            self._key = weakref.ref(cu_seqlens)
        return self._tables
