"""Experts in MXFP4, as in gpt-oss's checkpoints (OCP Microscaling Formats 1.0): numbers of four
bits (e2m1), with a power of two for each 32 of them.

A tensor W [experts, in, out] is two in the files: blocks, uint8 [experts, out, in / 32, 16], under
W's name with "_blocks", of which a byte holds two neighbours along `in`, the first in its low half;
and scales, uint8 [experts, out, in / 32], under the name with "_scales", of which s stands for
2^(s - 127).
"""

from typing import Any

import torch
from torch import Tensor

from vapo_megatron.models.rules import SliceableTensor

BLOCKS = "_blocks"
SCALES = "_scales"
# Numbers that share a scale, and the bytes that they take.
_GROUP = 32
_BYTES = 16
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# By the four bits, of which the highest is the sign.
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)


class Mxfp4Tensor:
    """A tensor [experts, in, out] in bfloat16, in which all these numbers are exact, of its blocks
    and scales; an index reads only the experts that it asks for."""

    dtype = "BF16"

    def __init__(
        self, blocks: SliceableTensor, scales: SliceableTensor, shape: tuple[int, ...]
    ) -> None:
        """shape: of the tensor, from shape_of."""
        self._blocks = blocks
        self._scales = scales
        self.shape = shape

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        values = dequantize(self._blocks[first], self._scales[first])
        if not others:
            return values
        return values[tuple(others)] if isinstance(first, int) else values[(slice(None), *others)]


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the tensor with blocks and scales of these shapes; None where they do not belong
    together."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != _BYTES:
        return None
    experts, columns, groups = scales
    return (experts, groups * _GROUP, columns)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., in, out] of blocks [..., out, in / 32, 16] and scales [..., out, in / 32]."""
    both = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    values = torch.ldexp(_VALUES[both.to(torch.int64)], exponents[..., None])
    return values.flatten(-2).transpose(-1, -2)
