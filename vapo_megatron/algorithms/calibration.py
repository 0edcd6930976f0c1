"""Values calibrated by the returns of past steps, and trusted accordingly (docs/algorithms.md, vapo_direct).

Instead of the critic's raw value v of a state, the advantage uses

    V~ = c_p . x        x = (1, v, m)        p = floor(log2 t)

t is the token's number in its response, from 1; m is the mean return of the other responses of its group, and 0 in
groups of one. c_p is a ridge regression of the returns of past steps on x, shrunk towards the coefficients of all bins
together, and those towards (0, 0, 1). A response influences neither its own coefficients nor its own m, and v precedes
the action: V~ is a baseline that adds no bias to the policy gradient where lambda is 1. The coefficient b_p of v also
says how far temporal differences of V~ may be trusted:

    g = sum_p n_p clamp(2 b_p, 0, 1) / sum_p n_p        A = g GAE(V~) + (1 - g) (R - V~)

A critic that explains nothing has b = 0, which leaves R - V~. Related work: SPO (arXiv 2509.13232), V0.5 (2603.10848),
PPI++ (2311.01453).
"""

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
    """Statistics of past steps, float64, by bin of position. In each bin every response weighs the same.

    Attributes:
        gram: [BINS, 3, 3], sums of x x^T.
        cross: [BINS, 3], sums of x R.
        responses: [BINS], the number of responses that reach the bin.
    """

    gram: Tensor
    cross: Tensor
    responses: Tensor

    def followed_by(self, later: "Moments") -> "Moments":
        """These moments, decayed, plus those of the next step."""
        return Moments(*(DECAY * a + b for a, b in zip(self, later, strict=True)))

    def state(self) -> list[Any]:
        """The content of a checkpoint, which from_state restores to the bit."""
        return [tensor.tolist() for tensor in self]

    @staticmethod
    def from_state(state: list[Any]) -> "Moments":
        """The moments from state()."""
        return Moments(*(torch.tensor(values, dtype=torch.float64) for values in state))


class Coefficients(NamedTuple):
    """The coefficients of V~, and what they say of the critic.

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
    """floor(log2 t) of each token, t its number in the response from 1: int64 [S + 1] -> int64 [T]."""
    _, exponent = torch.frexp((positions(cu_seqlens) + 1).double())
    return (exponent.long() - 1).clamp(max=BINS - 1)


def response_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Tokens, sum of v and sum of v^2 of each response in each bin: float32 [T] -> float64 [S, BINS, 3].

    A response's sums do not depend on the other responses.
    """
    samples = cu_seqlens.numel() - 1
    cell = to_tokens(torch.arange(samples), cu_seqlens) * BINS + bins_of(cu_seqlens)
    v = values.double()
    kinds = [torch.bincount(cell, weight, minlength=samples * BINS) for weight in (torch.ones_like(v), v, v * v)]
    # Without any token torch counts in int64.
    return torch.stack(kinds, 1).double().view(samples, BINS, 3)


def moments(sums: Tensor, returns: Tensor, group_means: Tensor) -> Moments:
    """Moments of one step.

    Args:
        sums: float64 [S, BINS, 3], see response_sums().
        returns: [S], the return R of each response.
        group_means: [S], m; 0 in groups of one.
    """
    tokens, v, vv = sums.unbind(-1)
    m, r = group_means.double()[:, None], returns.double()[:, None]
    gram = torch.stack((tokens, v, m * tokens, v, vv, m * v, m * tokens, m * v, m * m * tokens), -1).sum(0)
    cross = torch.stack((r * tokens, r * v, r * m * tokens), -1).sum(0)
    responses = (tokens > 0).sum(0).double()
    weight = responses / tokens.sum(0).clamp(min=1)
    return Moments(gram.view(BINS, 3, 3) * weight[:, None, None], cross * weight[:, None], responses)


def coefficients(past: Moments) -> Coefficients:
    """The ridge regressions of past steps: over all bins towards (0, 0, 1), per bin towards that over all."""
    prior = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    of_all = _ridge(past.gram.sum(0), past.cross.sum(0), past.responses.sum(0), prior)
    bins = _ridge(past.gram, past.cross, past.responses, of_all.expand(BINS, 3))
    share = past.responses / past.responses.sum().clamp(min=1e-9)
    trust = ((2 * bins[:, 1]).clamp(0, 1) * share).sum()
    return Coefficients(bins, float(trust), float((bins[:, 1] * share).sum()), float((bins[:, 2] * share).sum()))


def _ridge(gram: Tensor, cross: Tensor, responses: Tensor, prior: Tensor) -> Tensor:
    """argmin_c of the mean of (R - c . x)^2 plus a penalty on c - prior that fades as 1 / responses: [..., 3]."""
    n = responses.clamp(min=1e-9)[..., None]
    penalty = _PRIOR_VARIANCE * _STRENGTH / n
    matrix = gram / n[..., None] + (penalty[..., None] + 1e-9) * torch.eye(3, dtype=torch.float64)
    return torch.linalg.solve(matrix, cross / n + penalty * prior)


def calibrated_values(values: Tensor, group_means: Tensor, cu_seqlens: Tensor, by_bin: Coefficients) -> Tensor:
    """V~ of each token: float32 [T], [S], int64 [S + 1] -> float32 [T]."""
    c = by_bin.bins[bins_of(cu_seqlens)]
    return (c[:, 0] + c[:, 1] * values.double() + c[:, 2] * to_tokens(group_means.double(), cu_seqlens)).float()


def baseline_and_trust(
    values: Tensor, group_means: Tensor, others: Tensor, cu_seqlens: Tensor, past: Coefficients | None
) -> tuple[Tensor, float]:
    """V~ of each token, float32 [T], and g. Without a past (the first step) V~ is the mean of the others, and g is 0.

    The rest is as in calibrated_values(); others: [S], baselines.leave_one_out() of the returns.
    """
    if past is None:
        return to_tokens(others.float(), cu_seqlens), 0.0
    return calibrated_values(values, group_means, cu_seqlens, past), past.trust


def trusted_advantages(
    token_rewards: Tensor, baseline: Tensor, cu_seqlens: Tensor, lam: Tensor, trust: float, of: Tensor | None = None
) -> Tensor:
    """A = g GAE(V~) + (1 - g) (R - V~), with V~ as baseline: float32 [T]. Arguments are those of segmented_gae()."""
    bootstrapped = segmented_gae(token_rewards, baseline, cu_seqlens, lam, of=of)
    return trust * bootstrapped + (1 - trust) * segmented_gae(token_rewards, baseline, cu_seqlens, 1.0, of=of)
