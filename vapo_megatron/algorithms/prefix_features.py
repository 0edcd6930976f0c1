"""Features of a state that follow from the tokens before it, which a rollout brings along.

They are regressors of values (regression.py). A feature that knew the token that follows, or how
long the response becomes, would bias the policy gradient. Therefore every feature here is a running
statistic of what before() lets
through: a token's column holds nothing of that token or of later ones.

Low log-probs of earlier tokens mark slips. Related work: entropy as a bound of the credit that a
token can carry (EAPO, arXiv 2604.11056); signals of surprise under adapters (ARCA, arXiv
2606.00257).
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Column = NDArray[np.float64]

_UNLIKELY = math.log(0.2)
# Log-probs below it say no more, and -inf would end the statistics of all later steps
_LEAST = -30.0
_SCALE = 0.2  # of sums in nats, so that the coefficients of all features are of one size


def before(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The value of the token before each token in its response, 0 at the first: [T] -> float64
    [T]."""
    shifted = torch.zeros(len(x), dtype=torch.float64)
    shifted[1:] = x[:-1]
    bounds = cu_seqlens.long()
    shifted[bounds[:-1][bounds.diff() > 0]] = 0.0
    return shifted


def running(x: Tensor, cu_seqlens: Tensor, statistics: list[Callable[[Column], Column]]) -> Tensor:
    """Running statistics of the tokens before each token: [T], [S + 1] -> float64 [len(statistics),
    T].

    statistics: functions of n numbers that return n, the k-th from the first k. A response's
        columns do not depend on
    the other responses, not even by rounding.
    """
    earlier = before(x, cu_seqlens).numpy()
    columns = np.zeros((len(statistics), len(earlier)))
    for start, end in pairwise(cu_seqlens.tolist()):
        for column, statistic in zip(columns, statistics, strict=True):
            column[start:end] = statistic(earlier[start:end])
    return torch.from_numpy(columns)


def so_far(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over the tokens before each token: [T], [S + 1] -> float64 [T]."""
    return running(x, cu_seqlens, [np.add.accumulate])[0]


def surprise(logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum and minimum of the log-probs of earlier tokens, and how many had a probability below 0.2:
    float64 [3, T].

    logprobs: [T], of each token under the policy that drew it.
    """
    return running(
        logprobs.double().clamp(min=_LEAST),
        cu_seqlens,
        [
            lambda x: _SCALE * np.add.accumulate(x),
            lambda x: _SCALE * np.minimum.accumulate(x),
            lambda x: np.add.accumulate(x < _UNLIKELY, dtype=np.float64),
        ],
    )


def entropy(entropies: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum and maximum of the policy's entropies at earlier tokens, in nats: [T] -> float64 [2,
    T]."""
    return running(
        entropies,
        cu_seqlens,
        [lambda x: _SCALE * np.add.accumulate(x), np.maximum.accumulate],
    )
