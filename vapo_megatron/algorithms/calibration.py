"""Values calibrated by the returns of past steps, and trusted accordingly (docs/algorithms.md,
vapo_direct).

Instead of the critic's raw value v of a state, the advantage uses

    V~ = c_p . x        x = (1, v, m)        p = floor(log2 t)

t is the token's number in its response, from 1; m is the mean return of the other responses of its
group, and 0 in groups of one. c_p is a ridge regression of the returns of past steps on x, shrunk
towards the coefficients of all bins together, and those towards (0, 0, 1). A response influences
neither its own coefficients nor its own m, and v precedes the action: V~ is a baseline that adds no
bias to the policy gradient where lambda is 1. The coefficient b_p of v also says how far temporal
differences of V~ may be trusted:

    g = sum_p n_p clamp(2 b_p, 0, 1) / sum_p n_p        A = g GAE(V~) + (1 - g) (R - V~)

A critic that explains nothing has b = 0, which leaves R - V~. Related work: SPO (arXiv 2509.13232),
V0.5 (2603.10848), PPI++ (2311.01453).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import positions
from vapo_megatron.algorithms.gae import segmented_gae
from vapo_megatron.algorithms.segments import to_tokens

BINS = 20  # the last one begins at token 2^19
DECAY = 0.7  # of what earlier steps said, each step
_STRENGTH = 8.0  # responses that the prior is worth, times the variance of x that they would have
_PRIOR_VARIANCE = 0.2


class Moments(NamedTuple):
    """Statistics of past steps, float64, by bin of position. In each bin every response weighs the
    same.

    Attributes:
        gram: [BINS, K, K], sums of x x^T.
        cross: [BINS, K], sums of x R.
        responses: [BINS], the number of responses that reach the bin.
    """

    gram: Tensor
    cross: Tensor
    responses: Tensor

    def followed_by(self, later: "Moments") -> "Moments":
        """These moments, decayed, plus the next step's."""
        return Moments(*(DECAY * a + b for a, b in zip(self, later, strict=True)))

    def state(self) -> list[Any]:
        """The content of a checkpoint, which from_state restores to the bit."""
        return [tensor.tolist() for tensor in self]

    @staticmethod
    def from_state(state: list[Any]) -> "Moments":
        """The moments from state()."""
        return Moments(*(torch.tensor(values, dtype=torch.float64) for values in state))

    @property
    def mean_return(self) -> float:
        """Mean return over the responses of all bins; 0 without any."""
        return float(self.cross[:, 0].sum() / self.responses.sum().clamp(min=1e-9))


class Fit(NamedTuple):
    """Coefficients of a regression of returns on x.

    Attributes:
        bins: float64 [BINS, K], by bin of position.
        mean: float64 [K], their mean over responses.
        trust: mean over responses of clamp(2 b_p, 0, 1), by column of x: float64 [K].
    """

    bins: Tensor
    mean: Tensor
    trust: Tensor


class Coefficients(NamedTuple):
    """The coefficients of V~, and how much the critic can be trusted.

    Attributes:
        bins: float64 [BINS, 3].
        trust: g, in [0, 1].
        slope: mean of b_p, the coefficient of v, over responses.
        group_weight: mean of the coefficient of m.
    """

    bins: Tensor
    trust: float
    slope: float
    group_weight: float


def bins_of(cu_seqlens: Tensor) -> Tensor:
    """floor(log2 t) of each token, t its number in the response from 1: int64 [S + 1] -> int64
    [T]."""
    _, exponent = torch.frexp((positions(cu_seqlens) + 1).double())
    return (exponent.long() - 1).clamp(max=BINS - 1)


def response_sums(columns: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Tokens, sums of each column and sums of their products of each response in each bin.

    A response's sums do not depend on the other responses.

    Args:
        columns: [C, T], what x has by token.
        cu_seqlens: int64 [S + 1].

    Returns:
        float64 [S, BINS, 1 + C + C (C + 1) / 2]; each column is multiplied with itself
        and with later ones.
    """
    x = columns.double()
    lengths = _bin_lengths(cu_seqlens)

    def total(column: Tensor) -> Tensor:
        # The tokens of a response in a bin are neighbours: their sum is in order.
        return torch.segment_reduce(column, "sum", lengths=lengths.flatten(), unsafe=True)

    if len(x):
        product = torch.empty_like(x[0])
    else:
        product = x.new_empty(0)
    kinds = [lengths.flatten().double(), *map(total, x)]
    for first, column in enumerate(x):
        for other in x[first:]:
            torch.mul(column, other, out=product)
            kinds.append(total(product))
    return torch.stack(kinds, 1).view(*lengths.shape, len(kinds))


def _bin_lengths(cu_seqlens: Tensor) -> Tensor:
    """The number of each response's tokens in each bin: int64 [S, BINS]."""
    starts = 2 ** torch.arange(BINS) - 1
    ends = torch.cat((starts[1:], torch.tensor([2**62])))
    lengths = cu_seqlens.long().diff()[:, None]
    return torch.minimum(lengths, ends).sub(starts).clamp(min=0)


def moments(sums: Tensor, returns: Tensor, by_response: Tensor) -> Moments:
    """Moments of one step, of x = (1, the columns by token, those by response).

    Args:
        sums: float64 [S, BINS, 1 + C + C (C + 1) / 2], see response_sums().
        returns: [S], the return R of each response.
        by_response: [D, S], what x has by response, such as m, the mean of the others.
    """
    columns = _columns_of(sums.shape[-1])
    totals = sums[..., : 1 + columns].unbind(-1)
    products = iter(sums[..., 1 + columns :].unbind(-1))
    r = returns.double()[:, None]
    per_response = [row.double()[:, None] for row in by_response]
    size = 1 + columns + len(per_response)
    gram = sums.new_zeros(BINS, size, size)

    def put(row: int, column: int, cells: Tensor) -> None:
        gram[:, row, column] = gram[:, column, row] = cells.sum(0)

    for k, total in enumerate(totals):
        put(0, k, total)
    for k in range(1, 1 + columns):
        for other in range(k, 1 + columns):
            put(k, other, next(products))
    for k, m in enumerate(per_response, 1 + columns):
        for other, total in enumerate(totals):
            put(k, other, m * total)
        for other, later in enumerate(per_response[k - 1 - columns :], k):
            put(k, other, m * later * totals[0])
    cells = [r * total for total in totals] + [r * m * totals[0] for m in per_response]
    cross = torch.stack([cell.sum(0) for cell in cells], -1)
    tokens = totals[0]
    responses = (tokens > 0).sum(0).double()
    weight = responses / tokens.sum(0).clamp(min=1)
    return Moments(gram * weight[:, None, None], cross * weight[:, None], responses)


def _columns_of(sums: int) -> int:
    """C, from the 1 + C + C (C + 1) / 2 sums of response_sums()."""
    return (math.isqrt(8 * sums + 1) - 3) // 2


def fit(past: Moments, prior: Tensor, by_position: bool = True) -> Fit:
    """The ridge regressions of past steps: over all bins towards the prior, per bin towards that
    over all.

    prior: float64 [K]. by_position: False: every bin gets the coefficients over all bins.
    """
    of_all = _ridge(past.gram.sum(0), past.cross.sum(0), past.responses.sum(0), prior)
    bins = of_all.expand(BINS, len(prior))
    if by_position:
        bins = _ridge(past.gram, past.cross, past.responses, bins)
    share = (past.responses / past.responses.sum().clamp(min=1e-9))[:, None]
    return Fit(bins, (bins * share).sum(0), ((2 * bins).clamp(0, 1) * share).sum(0))


def coefficients(past: Moments) -> Coefficients:
    """The regression on x = (1, v, m), towards (0, 0, 1)."""
    regression = fit(past, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    _, slope, group_weight = regression.mean.tolist()
    return Coefficients(regression.bins, float(regression.trust[1]), slope, group_weight)


def _ridge(gram: Tensor, cross: Tensor, responses: Tensor, prior: Tensor) -> Tensor:
    """argmin_c of the mean of (R - c . x)^2 plus a penalty on c - prior that fades as 1 /
    responses: [..., K]."""
    n = responses.clamp(min=1e-9)[..., None]
    penalty = _PRIOR_VARIANCE * _STRENGTH / n
    identity = torch.eye(gram.shape[-1], dtype=torch.float64)
    matrix = gram / n[..., None] + (penalty[..., None] + 1e-9) * identity
    return torch.linalg.solve(matrix, cross / n + penalty * prior)


def predicted(columns: Tensor, by_response: Tensor, cu_seqlens: Tensor, bins: Tensor) -> Tensor:
    """c_p . x of each token: [C, T], [D, S], int64 [S + 1], float64 [BINS, 1 + C + D] -> float64
    [T]."""
    position = bins_of(cu_seqlens)
    by_token = [*columns.double(), *(to_tokens(row.double(), cu_seqlens) for row in by_response)]
    total = bins[position, 0]
    for k, x in enumerate(by_token, 1):
        total = total + bins[position, k] * x
    return total


def calibrated_values(
    values: Tensor, group_means: Tensor, cu_seqlens: Tensor, by_bin: Coefficients
) -> Tensor:
    """V~ of each token: float32 [T], [S], int64 [S + 1] -> float32 [T]."""
    return predicted(values[None], group_means[None], cu_seqlens, by_bin.bins).float()


def baseline_and_trust(
    values: Tensor,
    group_means: Tensor,
    others: Tensor,
    cu_seqlens: Tensor,
    past: Coefficients | None,
) -> tuple[Tensor, float]:
    """V~ of each token, float32 [T], and g. Without a past (the first step) V~ is the mean of the
    others, and g is 0.

    The rest is as in calibrated_values(); others: [S], baselines.leave_one_out() of the returns.
    """
    if past is None:
        return to_tokens(others.float(), cu_seqlens), 0.0
    return calibrated_values(values, group_means, cu_seqlens, past), past.trust


def trusted_advantages(
    token_rewards: Tensor,
    baseline: Tensor,
    cu_seqlens: Tensor,
    lam: Tensor,
    trust: float,
    of: Tensor | None = None,
) -> Tensor:
    """A = g GAE(V~) + (1 - g) (R - V~), with V~ as baseline: float32 [T]. Arguments as in
    segmented_gae()."""
    bootstrapped = segmented_gae(token_rewards, baseline, cu_seqlens, lam, of=of)
    return trust * bootstrapped + (1 - trust) * segmented_gae(
        token_rewards, baseline, cu_seqlens, 1.0, of=of
    )
