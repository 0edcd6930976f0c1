"""TETHER: a baseline between the mean of the group and the value (Le Critique, arXiv 2608.16739,
section 5 and appendix C).

    b = (1 - rho) B + rho V                                             (equation 15)

B is the mean return of the other responses of the group, V the critic's value of the token's state.
Each step's returns say which mixture would have predicted them best, which later steps use:

    rho' = clip(sum (R - B)(V - B) / sum (V - B)^2, 0, 1)               (equations 16 and 22)
    rho <- d rho + (1 - d) rho'                                         (equation 17)

Sums are over tokens. rho begins at 0, the group's mean. A response influences neither its own B nor
its step's rho, so that b adds no bias to the policy gradient where lambda is 1.
calibration.py fits more: an intercept and separate coefficients for V and for the mean, by
position, and how far differences of values may be trusted.
"""

from torch import Tensor

from vapo_megatron.algorithms.segments import to_tokens

DECAY = 0.95  # d, section 6.1


def baseline(values: Tensor, others: Tensor, cu_seqlens: Tensor, rho: float) -> Tensor:
    """b of each token: [T], [S], int64 [S + 1] -> float32 [T]."""
    group = to_tokens(others.double(), cu_seqlens)
    return (group + rho * (values.double() - group)).float()


def best_mixture(sums: Tensor, returns: Tensor, others: Tensor) -> float | None:
    """The rho in [0, 1] that would have predicted a step's returns best; None where V is B
    everywhere.

    Args:
        sums: float64 [S, BINS, 3], calibration.response_sums() of the values.
        returns: [S], R of each response.
        others: [S], B of each response.
    """
    tokens, values, squares = sums.sum(1).unbind(-1)
    group = others.double()
    apart = values - tokens * group
    distance = float((squares - 2 * group * values + tokens * group.square()).sum())
    if distance <= 0:
        return None
    gain = float(((returns.double() - group) * apart).sum())
    return min(1.0, max(0.0, gain / distance))


def after_step(rho: float, best: float | None) -> float:
    """The rho of the next step; best: best_mixture() of this one."""
    if best is None:
        return rho
    return DECAY * rho + (1 - DECAY) * best
