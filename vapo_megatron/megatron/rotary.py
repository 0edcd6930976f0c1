"""Rotary position embedding of packed sequences."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.microbatch import Prefix, local_positions
from vapo_megatron.models.rotary import PositionScale


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.interleaved, -1), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels = 2 * cos.shape[-1]
    result[..., channels:] = x[..., channels:]
    real, imaginary = _parts(x[..., :channels], interleaved)
    out_real, out_imaginary = _parts(result[..., :channels], interleaved)
    torch.mul(real, cos, out=out_real).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=out_imaginary).addcmul_(real, sin, value=sign)
    return result


def _parts(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the real and the imaginary parts."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    real, imaginary = x.chunk(2, -1)
    return real, imaginary


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first 2 * n channels of x [t, heads, d] by angles given as cos and sin [t, 1, n];
    the others stay.

    interleaved: whether real and imaginary part of a pair are neighbours; otherwise they are n
        channels apart.
    """
    turned: Tensor = _Rotate.apply(x, cos, sin, interleaved)
    return turned


class RotaryTables:
    """Cosines and sines of a context-parallel rank's positions, shared by the layers of a model."""

    def __init__(
        self,
        inv_freq: Tensor,
        cp_size: int,
        cp_rank: int,
        interleaved: bool = False,
        query_scale: PositionScale | None = None,
    ) -> None:
        """inv_freq: float32 [n], angle between neighbouring positions. interleaved: see rotate.
        query_scale: of queries, after they are turned."""
        self._inv_freq = inv_freq
        self._cp = (cp_size, cp_rank)
        self._query_scale = query_scale
        self._factors: Tensor | None = None
        self.interleaved = interleaved
        self._key: weakref.ref[Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def turn(
        self,
        query: Tensor,
        key: Tensor,
        cu_seqlens: Tensor,
        factor: float = 1.0,
        prefixes: Sequence[Prefix] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries [t, heads, d] and keys [t, kv_heads, d] at their positions in the sequences.
        factor: of their turned channels. prefixes: as in of()."""
        cos, sin = self.of(cu_seqlens, query.dtype, prefixes)
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        query = rotate(query, cos, sin, self.interleaved)
        key = rotate(key, cos, sin, self.interleaved)
        return query if self._factors is None else query * self._factors, key

    def of(
        self, cu_seqlens: Tensor, dtype: torch.dtype, prefixes: Sequence[Prefix] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both [t, 1, n] in dtype, on the device of cu_seqlens [sequences + 1]. They are cached for
        as long as cu_seqlens is the same tensor, which must not be changed, nor given with other
        prefixes. prefixes: positions before the first one of each sequence; None: nowhere."""
        last = self._key() if self._key is not None else None
        if last is not cu_seqlens or self._tables is None or self._tables[0].dtype != dtype:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            before = [0] * len(lengths)
            if prefixes is not None:
                before = [prefix.length for prefix in prefixes]
            positions = torch.cat(
                [torch.arange(first, first + n) for first, n in zip(before, lengths, strict=True)]
            )[local_positions(lengths, *self._cp)]
            angles = torch.outer(positions.float(), self._inv_freq)[:, None]
            device = cu_seqlens.device
            self._tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
            if self._query_scale is not None:
                factors = self._query_scale.of(positions)[:, None, None]
                self._factors = factors.to(device, dtype)
            self._key = weakref.ref(cu_seqlens)
        return self._tables
