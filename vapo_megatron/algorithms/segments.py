"""Packed responses: T tokens of S responses end to end, response s at tokens cu_seqlens[s] to
cu_seqlens[s + 1]."""

from itertools import pairwise

import torch
from torch import Tensor


def check_bounds(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise ValueError unless cu_seqlens is a non-decreasing int32 or int64 vector [S + 1] from 0
    to `tokens`."""
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.numel() == 0
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [S + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(
            f"cu_seqlens must run from 0 to {tokens} (the tokens), it runs {bounds[0]} to "
            f"{bounds[-1]}"
        )
    if any(end < start for start, end in pairwise(bounds)):
        raise ValueError("cu_seqlens must not decrease")


def response_lengths(cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Tokens of each response, int64 [S]; with a mask [T], the tokens for which it is not 0."""
    if mask is None:
        return cu_seqlens.long().diff()
    return segment_sum((mask != 0).long(), cu_seqlens)


def to_tokens(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Gives every token the value of its response: [S] -> [T], dtype kept."""
    lengths = cu_seqlens.long().diff().to(x.device)
    # Without output_size torch takes ten times as long.
    return x.repeat_interleave(lengths, output_size=int(cu_seqlens[-1]))


def tokens_from(starts: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The tokens of each response from its starts[s]-th on: int64 [S] -> bool [T]."""
    first = cu_seqlens[:-1].long() + starts
    return torch.arange(int(cu_seqlens[-1]), device=starts.device) >= to_tokens(first, cu_seqlens)


def segment_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over the tokens of each response: [T] -> [S]; an empty response gives 0.
    Differentiable."""
    responses = cu_seqlens.numel() - 1
    # In the same order, to the same bits, a twentieth of the time
    if x.is_floating_point() and x.numel():
        return torch.segment_reduce(
            x, "sum", lengths=cu_seqlens.long().diff().to(x.device), unsafe=True
        )
    owner = to_tokens(torch.arange(responses, device=x.device), cu_seqlens)
    return x.new_zeros(responses).index_add(0, owner, x)


def segment_mean(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over the tokens of each response: [T] -> [S]; an empty one gives 0. Differentiable."""
    return segment_sum(x, cu_seqlens) / response_lengths(cu_seqlens).clamp(min=1)


def extent(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean, sum of squared distances to it, minimum and maximum of each response's x [T]: float64
    [S, 4].

    0, 0, infinity and its negative for an empty response. They do not depend on the other
    responses.
    """
    x = x.double()
    responses = cu_seqlens.numel() - 1
    owner = to_tokens(torch.arange(responses, device=x.device), cu_seqlens)
    mean = segment_mean(x, cu_seqlens)
    spread = segment_sum((x - mean[owner]).square(), cu_seqlens)
    ends = [
        x.new_full((responses,), start).scatter_reduce_(0, owner, x, kind)
        for start, kind in ((torch.inf, "amin"), (-torch.inf, "amax"))
    ]
    return torch.stack((mean, spread, *ends), dim=1)


def last_tokens(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the last token of every response that has one.

    Returns (responses, tokens), two int64 vectors of equal length: indices into [S] and into [T].
    """
    responses = cu_seqlens.diff().nonzero().squeeze(1)
    return responses, cu_seqlens[responses + 1].long() - 1


def place_terminal(
    x: Tensor, cu_seqlens: Tensor, tokens: int, earlier: Tensor | None = None
) -> Tensor:
    """Token rewards [T]: x[s] on the last token of response s, 0 elsewhere.

    x is [S]; empty responses are left out. earlier, [T]: the part of each x that came before the
    end, at its token.
    """
    if earlier is None:
        placed = x.new_zeros(tokens)
    else:
        placed = earlier.to(x.dtype, copy=True)
    responses, last = last_tokens(cu_seqlens)
    placed[last] += (x if earlier is None else x - segment_sum(earlier, cu_seqlens))[responses]
    return placed
