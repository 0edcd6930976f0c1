"""How good values are: what they say of Monte-Carlo returns, and what two free baselines say of the same tokens.

T tokens of S packed responses. `returns` are Monte-Carlo returns, whatever the critic's targets are: a target that is
made of values can be explained by values that know nothing. Tokens whose mask [T] is 0 (observations, responses without
a return) count nowhere. All results are float64.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import by_position, leave_one_out, positions
from vapo_megatron.algorithms.segments import check_bounds, last_tokens, response_lengths, to_tokens

# Edges of bins are quantiles; of so many values at most, evenly drawn.
_SAMPLE = 1 << 17


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - Var(R - V) / Var(R) over the tokens whose mask is not 0 (all without one): scalar float64.

    1 at best, without lower bound; 0 where all returns are equal or there are none: nothing is there to explain.
    """
    actual, predicted = _kept(returns, mask), _kept(values, mask)
    if actual.numel() == 0:
        return actual.new_zeros(())
    variance = actual.var(correction=0)
    residual = (actual - predicted).var(correction=0)
    return torch.where(variance > 0, 1 - residual / variance.where(variance > 0, 1), 0)


class Explained(NamedTuple):
    """What critic and free baselines explain of the variance of the same returns, scalars.

    gain is the critic's less that of the best of both baselines and a constant, which explains 0.
    """

    critic: Tensor
    leave_one_out: Tensor
    position: Tensor
    gain: Tensor


@torch.no_grad()
def explained_beside_baselines(
    values: Tensor, returns: Tensor, cu_seqlens: Tensor, group_ids: Tensor, mask: Tensor | None = None
) -> Explained:
    """Explained variance of values, of the mean of the other responses of the group, and of a table by position.

    The return of a response, which the others of its group are compared with, is that of its first token.
    """
    critic = explained_variance(values, returns, mask)
    whole = returns_of_responses(returns, cu_seqlens, mask)
    has = response_lengths(cu_seqlens, mask) > 0
    baseline = torch.zeros_like(whole)
    baseline[has] = leave_one_out(whole[has], group_ids[has])
    siblings = explained_variance(to_tokens(baseline, cu_seqlens), returns, mask)
    position = explained_variance(by_position(returns, cu_seqlens, group_ids, mask=mask), returns, mask)
    best = torch.stack((siblings, position)).max().clamp(min=0)
    return Explained(critic, siblings, position, critic - best)


def returns_of_responses(returns: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The return of each response, that of its first token whose mask is not 0: [T] -> float64 [S]; 0 without one."""
    first = (positions(cu_seqlens, mask) == 0) if mask is None else (positions(cu_seqlens, mask) == 0) & (mask != 0)
    found = returns.new_zeros(cu_seqlens.numel() - 1, dtype=torch.float64)
    owner = to_tokens(torch.arange(found.numel(), device=returns.device), cu_seqlens)
    found[owner[first]] = returns[first].double()
    return found


class Calibration(NamedTuple):
    """The line R = intercept + slope V of least squares, scalars: slope 1 and intercept 0 where values mean returns.

    Below 1 values are more extreme than what follows; above 1 they say too little. 0 where all values are equal.
    """

    slope: Tensor
    intercept: Tensor


@torch.no_grad()
def calibration(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Calibration:
    """Least squares of returns on values."""
    predicted, actual = _kept(values, mask), _kept(returns, mask)
    if predicted.numel() == 0:
        return Calibration(predicted.new_zeros(()), predicted.new_zeros(()))
    centred = predicted - predicted.mean()
    variance = centred.square().mean()
    # Values that are all equal differ from their mean by rounding alone.
    varies = variance > 1e-14 * predicted.square().mean()
    slope = torch.where(varies, (centred * actual).mean() / variance.where(varies, 1), 0)
    return Calibration(slope, actual.mean() - slope * predicted.mean())


class Reliability(NamedTuple):
    """Of each bin of values, from low to high, [B]: mean value, mean return, tokens."""

    values: Tensor
    returns: Tensor
    tokens: Tensor


@torch.no_grad()
def reliability(values: Tensor, returns: Tensor, bins: int = 10, mask: Tensor | None = None) -> Reliability:
    """Mean return in bins of about equally many tokens by their value; bins without tokens are left out."""
    predicted, actual = _kept(values, mask), _kept(returns, mask)
    if predicted.numel() == 0:
        return Reliability(predicted, actual, predicted.long())
    sample = predicted[:: max(1, predicted.numel() // _SAMPLE)]
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=sample.device)[1:-1]
    owner = torch.bucketize(predicted, torch.quantile(sample, inner).unique(), right=True)
    tokens = torch.bincount(owner)
    sums = [torch.bincount(owner, x)[tokens > 0] for x in (predicted, actual)]
    tokens = tokens[tokens > 0]
    return Reliability(sums[0] / tokens, sums[1] / tokens, tokens)


@torch.no_grad()
def bias_by_position(
    values: Tensor,
    returns: Tensor,
    cu_seqlens: Tensor,
    quantiles: Sequence[float] = (0, 0.25, 0.5, 0.75, 0.95),
    mask: Tensor | None = None,
) -> Tensor:
    """Mean over responses of V - R at the token floor(q (l - 1)) of the l tokens of each that count.

    Returns float64, one entry per quantile; empty responses do not count, and with none at all it is 0.
    Raises ValueError for a quantile outside [0, 1].
    """
    check_bounds(cu_seqlens, values.numel())
    if any(not 0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles must be in [0, 1], got {tuple(quantiles)}")
    bounds = cu_seqlens.to(values.device, torch.int64)
    if mask is not None:
        kept = mask.nonzero().squeeze(1)
        values, returns, bounds = values[kept], returns[kept], torch.searchsorted(kept, bounds)
    lengths = bounds.diff()
    starts, lengths = bounds[:-1][lengths > 0], lengths[lengths > 0]
    q = torch.tensor(list(quantiles), dtype=torch.float64, device=values.device)
    token = starts + (q[:, None] * (lengths - 1)).floor().long()
    bias = values[token].double() - returns[token].double()
    return bias.sum(dim=1) / max(1, lengths.numel())


@torch.no_grad()
def bias_by_outcome(
    values: Tensor, returns: Tensor, correct: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean of V - R over the tokens of correct and of incorrect responses; NaN where there are none of them.

    Values that mean returns are too low where the end was good and too high where it was bad, by as much as the end
    could not be known: at the last token both should be near 0.
    """
    good = to_tokens(correct, cu_seqlens) != 0
    error = _kept(values, mask) - _kept(returns, mask)
    good = good if mask is None else good[mask != 0]
    return error[good].mean(), error[~good].mean()


@torch.no_grad()
def bias_at_end(
    values: Tensor, returns: Tensor, correct: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """V - R at the last token that counts of correct and of incorrect responses, mean over responses; NaN if none."""
    responses, last = last_tokens(cu_seqlens, mask)
    good, error = correct[responses] != 0, values[last].double() - returns[last].double()
    return error[good].mean(), error[~good].mean()


@torch.no_grad()
def sign_agreement(advantages: Tensor, outcomes: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Correlation over tokens of the advantage's sign with the final result [S] of its response: scalar.

    0 where either is the same everywhere.
    """
    sign = _kept(advantages, mask).sign()
    return correlation(sign, _kept(to_tokens(outcomes, cu_seqlens), mask))


@torch.no_grad()
def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's: [N], [N] -> scalar; 0 where either is the same everywhere."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float64)
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = (x.square().mean() * y.square().mean()).sqrt()
    return torch.where(scale > 1e-12, (x * y).mean() / scale.where(scale > 1e-12, 1), 0)


def _kept(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.double() if mask is None else x[mask != 0].double()
