"""How well values explain Monte-Carlo returns, compared with two free baselines on the same tokens.

`returns` are Monte-Carlo returns, whatever the critic's targets are: even uninformed values explain
targets made of values. Everything follows from a few sums over each response's tokens (figures_of),
which can be computed for parts of the responses and joined. All results are float64.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import (
    bins_of_positions,
    leave_one_out,
    means_of_other_groups,
    positions,
    sums_by_group,
)
from vapo_megatron.algorithms.segments import check_bounds, segment_sum, to_tokens

_POSITION_BINS = 32


def _explained(residual: Tensor, variance: Tensor) -> Tensor:
    return torch.where(variance > 0, 1 - residual / variance, 0)


class Figures(NamedTuple):
    """Sums over each response's tokens: [S], 0 for a response without any; biases [Q, S].

    A spread is the sum of squared distances to the response's own mean; joint is the sum of
    products of both distances. errors are R - V; biases V - R at quantiles of the response.
    """

    tokens: Tensor
    values: Tensor
    values_spread: Tensor
    returns: Tensor
    returns_spread: Tensor
    joint: Tensor
    errors_spread: Tensor
    first_value: Tensor
    first_return: Tensor
    largest: Tensor
    sizes: Tensor
    biases: Tensor

    @classmethod
    def read(cls, columns: Tensor) -> "Figures":
        """Read the columns of figures_of, [S, 11 + Q]."""
        rows = columns.t()
        return cls._make((*rows[:11].unbind(), rows[11:]))

    def only(self, responses: Tensor) -> "Figures":
        """The figures of some responses, bool [S]."""
        return Figures(*(column[..., responses] for column in self))


@torch.no_grad()
def figures_of(
    values: Tensor, returns: Tensor, cu_seqlens: Tensor, quantiles: Sequence[float] = ()
) -> Tensor:
    """The columns of Figures, [S, 11 + Q]. A response's figures do not depend on the other
    responses.

    values, returns [T]. quantiles in [0, 1]: of biases, V - R at the token floor(q (l - 1)) of l.
    """
    check_bounds(cu_seqlens, values.numel())
    bounds = cu_seqlens.to(values.device, torch.int64)
    v = values.double()
    r = returns.double()
    lengths = bounds.diff()
    count = lengths.clamp(min=1)

    def centred(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = segment_sum(x, bounds) / count
        return mean, x - to_tokens(mean, bounds)

    mean_v, from_v = centred(v)
    mean_r, from_r = centred(r)
    _, from_e = centred(r - v)
    owner = to_tokens(torch.arange(len(lengths), device=v.device), bounds)
    largest = v.new_zeros(len(lengths)).scatter_reduce_(0, owner, v.abs(), "amax")
    filled = lengths > 0

    def at(tokens: Tensor, x: Tensor) -> Tensor:
        picked = x.new_zeros(len(lengths))
        picked[filled] = x[tokens[filled]]
        return picked

    columns = [
        lengths.double(),
        mean_v,
        segment_sum(from_v.square(), bounds),
        mean_r,
        segment_sum(from_r.square(), bounds),
        segment_sum(from_v * from_r, bounds),
        segment_sum(from_e.square(), bounds),
        at(bounds[:-1], v),
        at(bounds[:-1], r),
        largest,
        segment_sum(v.abs(), bounds),
    ]
    for quantile in quantiles:
        offset = (quantile * (lengths - 1)).floor().long()
        columns.append(at(bounds[:-1] + offset, v - r))
    return torch.stack(columns, dim=1)


def pooled(tokens: Tensor, means: Tensor, spreads: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the tokens of all responses, from each response's [S]; 0
    without tokens."""
    total = tokens.sum().clamp(min=1)
    mean = (tokens * means).sum() / total
    return mean, (spreads.sum() + (tokens * (means - mean).square()).sum()) / total


class Explained(NamedTuple):
    """Shares of the variance of the same returns that critic and free baselines explain, scalars.

    gain is the critic's minus the best of both baselines and a constant, which explains 0.
    """

    critic: Tensor
    leave_one_out: Tensor
    position: Tensor
    gain: Tensor


def explained(figures: Figures) -> Tensor:
    """1 - Var(R - V) / Var(R) over tokens: scalar, 1 at best, without lower bound; 0 where all
    returns are equal."""
    errors = pooled(figures.tokens, figures.returns - figures.values, figures.errors_spread)[1]
    return _explained(errors, pooled(figures.tokens, figures.returns, figures.returns_spread)[1])


def explained_beside_baselines(
    figures: Figures, group_ids: Tensor, position: Tensor, whole: Figures | None = None
) -> Explained:
    """Explained variance of values, of the mean of the other responses of the group, and of a table
    by position.

    The others of a group are compared with a response's return from its first token. position:
    explained_by_position(). whole: figures whose returns count what a response was paid before each
    token, which is known and is taken from the others' mean; None: nothing was.
    """
    tokens = figures.tokens
    variance = pooled(figures.tokens, figures.returns, figures.returns_spread)[1]
    critic = explained(figures)
    has = tokens > 0
    baseline = torch.zeros_like(tokens)
    baseline[has] = leave_one_out(figures.first_return[has], group_ids[has])
    # A term that is the same for all tokens of a response moves only its mean.
    from_start = figures if whole is None else whole
    siblings = _explained(
        pooled(tokens, from_start.returns - baseline, from_start.returns_spread)[1], variance
    )
    best = torch.stack((siblings, position)).max().clamp(min=0)
    return Explained(critic, siblings, position, critic - best)


@torch.no_grad()
def explained_by_position(
    returns: Tensor,
    cu_seqlens: Tensor,
    own: slice,
    lengths: Tensor,
    group_ids: Tensor,
    known: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor],
    gather_samples: Callable[[Tensor], Tensor],
) -> Tensor:
    """Explained variance of the mean return at the same position in the responses of all other
    groups: scalar.

    The table has bins of about equally many tokens, and is fitted without the group of the response
    that is looked up: its siblings share its prompt. A bin that no other group fills has the mean
    return of all other groups; a group that is alone uses its other responses.

    Args:
        returns, cu_seqlens: of the responses `own` of all S, whose groups are whole.
        lengths, group_ids: int64 [S], of all.
        known: bool [S]; the others count nowhere.
        sum_over_ranks: sums a part's figures over all parts.
        gather_samples: [local S, ...] to [S, ...].
    """
    owner = torch.unique(group_ids, return_inverse=True)[1]
    if owner.numel():
        groups = int(owner.max()) + 1
    else:
        groups = 0
    if groups == 1:
        groups = owner.numel()
        owner = torch.arange(groups)
    bins = bins_of_positions(lengths[known], _POSITION_BINS)
    counts = to_tokens(known[own], cu_seqlens)
    cell = bins[positions(cu_seqlens).clamp(max=len(bins) - 1)], to_tokens(owner[own], cu_seqlens)
    sums = sum_over_ranks(
        sums_by_group(returns[counts], cell[0][counts], cell[1][counts], _POSITION_BINS, groups)
    )
    residual = returns.double() - means_of_other_groups(sums)[cell]
    figures = Figures.read(gather_samples(figures_of(residual, returns, cu_seqlens))).only(known)
    variance = pooled(figures.tokens, figures.returns, figures.returns_spread)[1]
    return _explained(pooled(figures.tokens, figures.values, figures.values_spread)[1], variance)


def calibration(figures: Figures) -> tuple[Tensor, Tensor]:
    """Slope and intercept of the least squares of returns on values: 1 and 0 where values mean
    returns.

    Below 1 values are too extreme; above 1 they are too timid. 0 where all values are equal.
    """
    tokens = figures.tokens
    mean, variance = pooled(tokens, figures.values, figures.values_spread)
    actual = pooled(tokens, figures.returns, figures.returns_spread)[0]
    # Values that are all equal differ from their mean by rounding alone.
    varies = variance > 1e-14 * (variance + mean.square())
    joint = (
        figures.joint.sum() + (tokens * (figures.values - mean) * (figures.returns - actual)).sum()
    )
    slope = torch.where(varies, joint / tokens.sum() / variance, 0)
    return slope, actual - slope * mean


def slope_error(figures: Figures, slope: Tensor) -> Tensor:
    """Standard error of the slope of calibration(), with independent responses; 0 where all values
    are equal."""
    tokens = figures.tokens
    mean, actual = (
        pooled(tokens, means, means.new_zeros(()))[0] for means in (figures.values, figures.returns)
    )
    squares = figures.values_spread + tokens * (figures.values - mean).square()
    products = figures.joint + tokens * (figures.values - mean) * (figures.returns - actual)
    total = squares.sum()
    return torch.where(total > 0, (products - slope * squares).square().sum().sqrt() / total, 0)


def bias_by_position(figures: Figures) -> Tensor:
    """Mean over responses of V - R at each quantile of their tokens, [Q]; 0 without responses."""
    return figures.biases.sum(dim=1) / (figures.tokens > 0).sum().clamp(min=1)


def bias_by_outcome(figures: Figures, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of V - R over the tokens of correct and of incorrect responses; NaN where there are
    none.

    Calibrated values are too low for correct and too high for incorrect responses, by as much as
    the outcome could not be
    foreseen: at the last token both should be near 0.
    """
    sums = figures.tokens * (figures.values - figures.returns)
    good = correct != 0
    return sums[good].sum() / figures.tokens[good].sum(), sums[~good].sum() / figures.tokens[
        ~good
    ].sum()


def signs_of(advantages: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of the signs of each response's advantages, and the number that are not 0: [T] -> float64
    [S, 2]."""
    sign = advantages.sign().double()
    return torch.stack((segment_sum(sign, cu_seqlens), segment_sum(sign.abs(), cu_seqlens)), dim=1)


def sign_agreement(signs: Tensor, lengths: Tensor, outcomes: Tensor) -> Tensor:
    """Correlation over tokens of the advantage's sign (signs_of, [S, 2]) with the final result [S]
    of its response: scalar; 0 where either is constant."""
    total, (sums, squares) = lengths.sum().double(), signs.sum(0)
    mean, (outcome, outcomes_variance) = (
        sums / total,
        pooled(lengths, outcomes.double(), torch.zeros(())),
    )
    joint = (signs[:, 0] * (outcomes.double() - outcome)).sum() / total
    scale = ((squares / total - mean.square()).clamp(min=0) * outcomes_variance).sqrt()
    return torch.where(scale > 1e-12, joint / scale, 0)


@torch.no_grad()
def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's: [N], [N] -> scalar; 0 where either is constant."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float64)
    x = x.double() - x.double().mean()
    y = y.double() - y.double().mean()
    scale = (x.square().mean() * y.square().mean()).sqrt()
    return torch.where(scale > 1e-12, (x * y).mean() / scale, 0)
