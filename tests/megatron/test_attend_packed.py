"""Attention over a pack equals attention of each sequence by itself, gradients too, whichever way
the pack is cut."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from vapo_megatron.data.microbatch import local_positions
from vapo_megatron.megatron import packed_attention
from vapo_megatron.megatron.packed_attention import attend_packed, packed_segments

HEADS = 4
KV_HEADS = 2
SIZE = 8
SCALE = 0.3


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[t, heads, d] from softmax over masked scores, and a sink's, sequence by sequence."""
    rows = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        b, c = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) * SCALE
        hidden = torch.ones(len(a), len(a), dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones(len(a), len(a), dtype=torch.bool).tril(-window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, len(a), 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : len(a)]
        rows.append(torch.einsum("hqk,khd->qhd", weights, c))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "lengths",
    [[5], [16, 16, 16], [1, 9, 3, 20, 2], [100, 31, 150, 64]],
    ids=["one", "equal", "short", "long"],
)
@pytest.mark.parametrize("window", [None, 1, 7, 60])
@pytest.mark.parametrize("value_size", [SIZE, 6])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_pack_is_attended_to_sequence_by_sequence(
    lengths: list[int], window: int | None, value_size: int, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size))
    inputs = [
        torch.randn(sum(lengths), *shape, generator=generator).requires_grad_() for shape in shapes
    ]
    sinks = None
    if has_sinks:
        sinks = torch.randn(HEADS, generator=generator).requires_grad_()
        inputs.append(sinks)
    segments = packed_segments(lengths, 1, 0)
    found = attend_packed(inputs[0], inputs[1], inputs[2], segments, SCALE, window, sinks)
    expected = by_hand(inputs[0], inputs[1], inputs[2], lengths, window, sinks)
    assert torch.allclose(found, expected, atol=1e-5)
    weight = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_bfloat16_does_not_round_a_sink_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [16]
    # Keys of zeros: scores are 0 whatever the queries, so that sinks alone weight the values.
    q = torch.randn(16, HEADS, SIZE, generator=generator).bfloat16()
    k = torch.zeros(16, KV_HEADS, SIZE).bfloat16()
    v = torch.ones(16, KV_HEADS, SIZE).bfloat16()
    sinks = torch.tensor([5.03125, 4.96875, -3.0, 6.1875]).bfloat16()
    found = attend_packed(q, k, v, packed_segments(lengths, 1, 0), 0.0437, None, sinks)
    keys = torch.arange(1.0, 17.0)[:, None]
    expected = keys / (keys + sinks.float().exp())
    assert torch.allclose(found.float().mean(-1), expected, rtol=0.006)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_parts_of_context_parallel_ranks_are_the_whole(
    window: int | None, cp: int, has_sinks: bool
) -> None:
    lengths = [8, 16, 24, 48]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, SIZE, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    expected = by_hand(q, k, v, lengths, window, sinks)
    for rank in range(cp):
        mine = local_positions(lengths, cp, rank)
        segments = packed_segments(lengths, cp, rank)
        found = attend_packed(q[mine], k, v, segments, SCALE, window, sinks)
        assert torch.allclose(found, expected[mine], atol=1e-5)


@pytest.mark.parametrize("window", [None, 7, 60])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_runs_of_queries_are_the_whole_with_its_gradients(
    window: int | None, cp: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [8, 120, 24, 200]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, SIZE, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    sinks = None
    if has_sinks:
        sinks = torch.randn(HEADS, generator=generator).requires_grad_()
        inputs.append(sinks)
    mine = local_positions(lengths, cp, cp - 1)
    segments = packed_segments(lengths, cp, cp - 1)

    def attend() -> list[Tensor]:
        q, k, v = inputs[:3]
        out = attend_packed(q[mine], k, v, segments, SCALE, window, sinks)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        return [out, *torch.autograd.grad((out * weight).sum(), inputs)]

    expected = attend()
    monkeypatch.setattr(packed_attention, "_MASK_ENTRIES", 900)
    longest = [s for s in segments if packed_attention._is_long(s, window)]
    assert longest or (cp == 1 and window is None), "a causal square needs no mask"
    for mine_, whole in zip(attend(), expected, strict=True):
        assert torch.allclose(mine_, whole, atol=1e-5)


LONG = """
import resource, sys, torch
from vapo_megatron.megatron.packed_attention import attend_packed, packed_segments
tokens, cp, window = int(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
q = torch.randn(tokens // cp, 1, 16).requires_grad_()
k, v = (torch.randn(tokens, 1, 16).requires_grad_() for _ in range(2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend_packed(q, k, v, packed_segments([tokens], cp, 0), 0.25, window).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.full
@pytest.mark.parametrize(("cp", "window"), [(2, None), (1, 4096)])
def test_memory_grows_with_tokens_and_not_with_their_square(cp: int, window: int | None) -> None:
    def mebibytes(tokens: int) -> int:
        command = [sys.executable, "-W", "ignore", "-c", LONG, str(tokens), str(cp), str(window)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return int(done.stdout.split()[-1])

    # A mask of 32,768 tokens alone has 256 MiB at CP 2 and 1,024 without, and four times as many as
    # floats.
    assert mebibytes(32_768) < 400
