"""Attention over a pack equals attention of each sequence by itself, gradients too, whichever way the pack is cut."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.megatron.layer_spec import attend_packed, packed_segments

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 8, 0.3


def by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """[t, heads, d] from softmax over masked scores, sequence by sequence."""
    rows = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        b, c = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) * SCALE
        hidden = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), c))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "lengths", [[5], [16, 16, 16], [1, 9, 3, 20, 2], [100, 31, 150, 64]], ids=["one", "equal", "short", "long"]
)
def test_a_pack_is_attended_to_sequence_by_sequence(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    inputs = [torch.randn(sum(lengths), n, SIZE, generator=generator).requires_grad_() for n in heads]
    found = attend_packed(inputs[0], inputs[1], inputs[2], packed_segments(lengths, 1, 0), SCALE)
    expected = by_hand(inputs[0], inputs[1], inputs[2], lengths)
    assert torch.allclose(found, expected, atol=1e-5)
    weight = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
