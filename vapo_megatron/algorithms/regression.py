"""Values without a critic: the returns of past steps, regressed on features of the prefix that a
rollout brings along.

    V~_t = c_p . x_t        p = floor(log2 t)

It is calibration.py with more regressors, of which the critic's value may be one. What x holds:

    position   a 1 whose coefficient goes by p
    siblings   mean return of the other responses of the group
    prefix     mean return of the siblings with the same prefix (prefix_tree.py)
    surprise   sum and minimum of the earlier tokens' log-probs, number of probabilities below 0.2
    entropy    sum and maximum of the entropies at earlier tokens (both in prefix_features.py)
    history    tracked mean return of the prompt in earlier steps (baselines.py)
    value      the critic's value of the state

c is fitted on past steps alone; siblings and prefix leave the response itself out; all others are
of the prefix. So V~ is a baseline that adds no bias to the policy gradient where lambda is 1,
whatever the log-probs are. How far its temporal differences may be trusted is measured out of
sample: b_p is the slope of the returns of past steps on the values predicted before them,

    g = sum_p n_p clamp(2 b_p, 0, 1) / sum_p n_p        A = g GAE(V~) + (1 - g) (R - V~)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration
from vapo_megatron.algorithms.calibration import Fit, Moments
from vapo_megatron.algorithms.segments import segment_sum, to_tokens

# Of the features that are a return already, in units of V~, the first that there is has a
# coefficient of 1 until past steps say otherwise.
_RETURNS = ("siblings", "prefix", "history")


class Regressors(NamedTuple):
    """x of T states of S responses, without the 1.

    Attributes:
        names: the feature of each column, first those by token.
        by_token: [C, T].
        by_response: [D, S].
    """

    names: tuple[str, ...]
    by_token: Tensor
    by_response: Tensor

    @staticmethod
    def join(
        by_token: dict[str, Tensor], by_response: dict[str, Tensor], tokens: int, responses: int
    ) -> "Regressors":
        """Features by name, of one column ([T], [S]) or several ([columns, T]), as regressors."""
        names: list[str] = []
        parts = []
        for features, size in ((by_token, tokens), (by_response, responses)):
            columns = [torch.zeros(0, size, dtype=torch.float64)]
            for name, feature in features.items():
                columns.append(feature.double().view(-1, size))
                names += [name] * len(columns[-1])
            parts.append(torch.cat(columns))
        return Regressors(tuple(names), *parts)


def prior_of(names: tuple[str, ...], mean_return: float) -> Tensor:
    """The prior towards which the coefficients of past steps are shrunk: float64 [K].

    The mean of the siblings or, without it, the next feature that is a return; without any the mean
    return of past steps.
    """
    prior = torch.zeros(1 + len(names), dtype=torch.float64)
    leading = [name for name in _RETURNS if name in names]
    if leading:
        prior[1 + names.index(leading[0])] = 1.0
    else:
        prior[0] = mean_return
    return prior


def fitted(past: Moments, names: tuple[str, ...], by_position: bool) -> Fit:
    """The coefficients that past steps give. by_position: False: the same in all bins."""
    return calibration.fit(past, prior_of(names, past.mean_return), by_position)


def predicted(regressors: Regressors, cu_seqlens: Tensor, fit: Fit) -> Tensor:
    """V~ of each state: float64 [T]."""
    return calibration.predicted(regressors.by_token, regressors.by_response, cu_seqlens, fit.bins)


def trust(predictions: Moments | None) -> float:
    """g, in [0, 1]; 0 where nothing was predicted yet.

    predictions: moments of past steps' returns on x = (1, V~), V~ as it was predicted before they
        were known.
    """
    if predictions is None:
        return 0.0
    slopes = calibration.fit(predictions, torch.zeros(2, dtype=torch.float64))
    return min(1.0, float(slopes.trust[1]))


def contributions(regressors: Regressors, cu_seqlens: Tensor, fit: Fit) -> dict[str, Tensor]:
    """What each feature adds to V~, summed over the states of each response: float64 [S] by name.

    The first is position, the coefficient of 1. A response's sums do not depend on the other
    responses.
    """
    position = calibration.bins_of(cu_seqlens)
    sums = {"position": segment_sum(fit.bins[position, 0], cu_seqlens)}
    columns = [*regressors.by_token]
    columns += [to_tokens(column, cu_seqlens) for column in regressors.by_response]
    for k, (name, column) in enumerate(zip(regressors.names, columns, strict=True), 1):
        added = segment_sum(fit.bins[position, k] * column, cu_seqlens)
        sums[name] = sums.get(name, 0) + added
    return sums


def share_of_variance(sums: Tensor, states: Tensor, returns: Tensor) -> Tensor:
    """Cov(u, R) / Var(R) over states, of a feature that adds u to V~: scalar; 0 where all returns
    are equal.

    The shares of all features add up to Cov(V~, R) / Var(R), which is the explained variance of
    calibrated values.

    Args:
        sums: float64 [S], contributions() of one feature.
        states: int64 [S], the number of states of each response.
        returns: [S].
    """
    r = returns.double()
    total = states.sum().clamp(min=1)
    apart = r - (states * r).sum() / total
    variance = (states * apart.square()).sum()
    return torch.where(variance > 0, (sums * apart).sum() / variance, 0.0)
