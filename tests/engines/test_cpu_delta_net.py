"""The CPU engine's kernels of delta nets: prefill, prefill in pieces and decoding give what the
trainer computes from the whole sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.engines.inside import cpu_delta_net
from vapo_megatron.megatron.delta_net import causal_convolution, gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEYS, VALUES, KERNEL = 2, 6, 8, 5, 4
LENGTHS = (7, 70)
# Slots of the two requests, and of one that pads the batch.
SLOTS = torch.tensor([3, 1, -1])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(sum(LENGTHS), *shape, generator=torch.Generator().manual_seed(seed))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def pieces(x: Tensor, start: int, end: int) -> Tensor:
    """Tokens start to end of both requests, which end earlier where they are shorter."""
    return torch.cat([part[start:end] for part in x.split(LENGTHS)])


def in_pieces(cuts: list[int]) -> list[tuple[int, int, list[int]]]:
    spans = zip([0, *cuts], [*cuts, max(LENGTHS)], strict=True)
    return [
        (start, end, [max(0, min(end, length) - min(start, length)) for length in LENGTHS])
        for start, end in spans
    ]


@pytest.mark.parametrize("cuts", [[], [5], [3, 6]])
def test_prefill_in_pieces_gives_the_whole(cuts: list[int]) -> None:
    q, k = (drawn(KEY_HEADS, KEYS, seed=seed) for seed in (1, 2))
    v = drawn(VALUE_HEADS, VALUES, seed=3)
    decay = -F.softplus(drawn(VALUE_HEADS, seed=4))
    beta = drawn(VALUE_HEADS, seed=5).sigmoid()
    expected = gated_delta_rule(q, k, v, decay, beta, bounds(list(LENGTHS)), LENGTHS)
    states = torch.zeros(5, VALUE_HEADS, VALUES, KEYS)
    for start, end, lengths in in_pieces(cuts):
        given = (pieces(x, start, end)[None] for x in (q, k, v, decay, beta))
        out, _, _ = cpu_delta_net.chunk_gated_delta_rule_cpu(
            *given,
            initial_state=states,
            cu_seqlens=bounds(lengths),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=SLOTS,
        )
        torch.testing.assert_close(out[0], pieces(expected, start, end), rtol=1e-4, atol=1e-5)
    assert not states[[0, 2, 4]].any()


def test_decoding_goes_on_where_prefill_ended() -> None:
    """The last token of each request is decoded."""
    q, k = (drawn(KEY_HEADS, KEYS, seed=seed) for seed in (1, 2))
    v = drawn(VALUE_HEADS, VALUES, seed=3)
    a, b = (drawn(VALUE_HEADS, seed=seed) for seed in (4, 5))
    a_log, dt_bias = torch.randn(2, VALUE_HEADS, generator=torch.Generator().manual_seed(6))
    decay, beta = cpu_delta_net.fused_gdn_gating(a_log, a, b, dt_bias)
    whole = gated_delta_rule(q, k, v, decay[0], beta[0], bounds(list(LENGTHS)), LENGTHS)
    states = torch.zeros(5, VALUE_HEADS, VALUES, KEYS)
    first = torch.cat([torch.arange(start, end - 1) for start, end in ((0, 7), (7, 77))])
    cpu_delta_net.chunk_gated_delta_rule_cpu(
        *(x[None, first] for x in (q, k, v, decay[0], beta[0])),
        initial_state=states,
        cu_seqlens=bounds([6, 69]),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=SLOTS,
    )
    last = torch.tensor([6, 76, 0])
    out = cpu_delta_net.fused_sigmoid_gating_delta_rule_update(
        a_log,
        dt_bias,
        *(x[None, last] for x in (q, k, v)),
        a[last],
        b[last],
        initial_state_source=states,
        initial_state_indices=SLOTS,
        cu_seqlens=torch.arange(4),
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out[0, :2], whole[last[:2]], rtol=1e-4, atol=1e-5)
    assert not out[0, 2].any()


@pytest.mark.parametrize("cuts", [[], [2], [3, 6]])
def test_convolutions_remember_their_last_inputs(cuts: list[int]) -> None:
    x = drawn(9, seed=1)
    weight = torch.randn(9, KERNEL, generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    expected = F.silu(causal_convolution(x, weight, positions))
    states = torch.full((5, 9, KERNEL - 1), torch.nan)
    for start, end, lengths in in_pieces(cuts):
        out = cpu_delta_net.causal_conv1d_fn_cpu(
            pieces(x, start, end).T,
            weight,
            activation="silu",
            conv_states=states,
            has_initial_state=torch.tensor([start > 0] * 3),
            cache_indices=SLOTS,
            query_start_loc=bounds(lengths),
        )
        torch.testing.assert_close(out.T, pieces(expected, start, end))
    following = torch.randn(3, 9, generator=torch.Generator().manual_seed(3))
    out = cpu_delta_net.causal_conv1d_update_cpu(
        following, states, weight, activation="silu", conv_state_indices=SLOTS
    )
    for row, part in enumerate(x.split(LENGTHS)):
        longer = torch.cat((part, following[row : row + 1]))
        wanted = causal_convolution(longer, weight, torch.arange(len(longer)))[-1]
        torch.testing.assert_close(out[row], F.silu(wanted))
    assert not out[2].any()
