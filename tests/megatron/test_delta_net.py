"""Gated delta nets of packed sequences: the rule token by token in float64, and the convolution."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.megatron.delta_net import causal_convolution, delta_rule

# Shorter than a chunk, one, more than one; the longest neither first nor last.
LENGTHS = (3, 64, 1, 130, 65)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one sequence (arXiv 2412.06464, section 3.1), [t, heads, values]."""
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    outputs = []
    for token in range(len(q)):
        state = state * decay[token].exp()[:, None, None]
        held = torch.einsum("hkv,hk->hv", state, k[token])
        corrected = beta[token][:, None] * (v[token] - held)
        state = state + torch.einsum("hk,hv->hkv", k[token], corrected)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outputs)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, decays and steps of all sequences, with gradients."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(total, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(drawn(2, 8), dim=-1) for _ in range(2))
    made = [q, k, drawn(2, 6), -F.softplus(drawn(2)), drawn(2).sigmoid()]
    return [x.to(dtype).requires_grad_() for x in made]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_chunks_compute_the_recurrence(dtype: torch.dtype, near: float) -> None:
    exact = inputs(torch.float64)
    parts = zip(*(x.split(LENGTHS) for x in exact), strict=True)
    expected = torch.cat([token_by_token(*part) for part in parts])
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (expected * weight).sum().backward()
    given = inputs(dtype)
    out = delta_rule(*given, LENGTHS)
    (out * weight).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=near)
    for mine, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(
            mine.grad.double(), theirs.grad, rtol=0, atol=near * theirs.grad.abs().max().item()
        )


def test_convolution_begins_anew_in_every_sequence() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(LENGTHS), 5, generator=generator)
    weight = torch.randn(5, 4, generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    expected = [
        F.conv1d(F.pad(row.T, (3, 0))[None], weight[:, None], groups=5)[0].T
        for row in x.split(LENGTHS)
    ]
    torch.testing.assert_close(causal_convolution(x, weight, positions), torch.cat(expected))
