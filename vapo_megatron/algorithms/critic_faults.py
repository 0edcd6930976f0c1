"""Faults of a critic that show in one batch. T tokens of S packed responses, some of which begin in
the same state."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vapo_megatron.algorithms.critic_metrics import (
    Figures,
    calibration,
    correlation,
    pooled,
    slope_error,
)
from vapo_megatron.algorithms.segments import last_tokens, to_tokens

# The meaning of each fault, for people. The metrics critic/fault_<name> use the same keys.
FAULTS = {
    "constant": "values are all equal: a head that is frozen or zeroed",
    "frozen": (
        "the value head gets no gradient, though values are not their targets: it is frozen, or "
        "left out"
    ),
    "sign": (
        "values are low where responses end well: the sign of the reward, or of the value loss, is "
        "inverted"
    ),
    "scale": (
        "values order responses but are far from their returns in size: something scales them (a "
        "temperature?)"
    ),
    "temperature": (
        "values order states well and are all too large, or all too small, by one factor: "
        "something scales them"
    ),
    "shift": (
        "responses to one prompt begin with different values, though in one state: values are "
        "shifted against their tokens"
    ),
    "end": "the last tokens of responses, where the reward is, carry no loss: EOS is left out",
    "mask": "most tokens of responses that carry loss are masked: the mask is inverted",
    "targets": (
        "value targets are not those that the recorded values give: they were made after an update"
    ),
}


def beginnings(group_ids: Tensor, states: Tensor) -> Tensor:
    """Numbers of the states that responses begin in: equal for those of one group and one hash of
    what stands before their first token. int64 [S], int64 [S] -> int64 [S].

    Episodes of a group may open with other requests, and a mask may leave out first tokens.
    """
    return torch.unique(torch.stack((group_ids, states)), dim=1, return_inverse=True)[1]


def value_faults(figures: Figures, begins: Tensor, known: Tensor) -> list[str]:
    """Faults (keys of FAULTS) found in the values, compared with Monte-Carlo returns; none for a
    sound critic.

    Estimates count if they are beyond three standard errors over responses. figures [S]; begins,
    int64 [S]: beginnings(); known, bool [S]: the responses that have a return.
    """
    kept = figures.only(known)
    tokens = float(kept.tokens.sum())
    if tokens < 2:
        return []
    spread = float(pooled(kept.tokens, kept.values, kept.values_spread)[1].sqrt())
    if spread <= 1e-6 * max(1.0, float(kept.sizes.sum()) / tokens):
        return ["constant"]
    faults = list(_estimated(kept))
    # One state has one value, up to the rounding of bfloat16.
    rounding = max(0.1 * spread, 0.01 * float(kept.largest.max()))
    if sibling_gap(figures, begins) > rounding:
        return [*faults, "shift"]
    return faults


def _estimated(figures: Figures) -> Iterator[str]:
    has = figures.tokens > 0
    responses = int(has.sum())
    similarity = float(correlation(figures.values[has], figures.first_return[has]))
    if responses < 32 or abs(similarity) < 3 / responses**0.5:
        return
    if similarity < 0:
        yield "sign"
        return
    slope, _ = calibration(figures)
    margin = 3 * float(slope_error(figures, slope))
    # A critic that is still learning says too little, so that much is allowed on that side.
    if slope + margin < 0.4 or slope - margin > 4:
        yield "scale"


def sibling_gap(figures: Figures, begins: Tensor) -> float:
    """Mean over responses of |V - mean of those that begin alike| at their first token; above 0
    only by rounding if values are right."""
    first = figures.first_value[figures.tokens > 0]
    _, owner, sizes = torch.unique(
        begins[figures.tokens > 0], return_inverse=True, return_counts=True
    )
    means = first.new_zeros(sizes.numel()).index_add_(0, owner, first) / sizes
    shared = sizes[owner] > 1
    if bool(shared.any()):
        return float((first - means[owner]).abs()[shared].mean())
    return 0.0


def loss_counts(weights: Tensor, selected: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Counts over responses that carry loss (selected, bool [S]; loss weights [T]): tokens,
    weighted tokens, responses, responses whose last token is weighted. int64 [4]; add them up over
    parts of the responses."""
    counted = weights[to_tokens(selected, cu_seqlens)] != 0
    responses, last = last_tokens(cu_seqlens)
    ends = weights[last[selected[responses]]] != 0
    return torch.tensor([counted.numel(), int(counted.sum()), ends.numel(), int(ends.sum())])


def loss_faults(counts: Tensor) -> list[str]:
    """Faults (keys of FAULTS) found in the loss weights, from loss_counts."""
    tokens, counted, responses, ends = counts.tolist()
    if 2 * counted < tokens:
        return ["mask"]
    if 2 * ends < responses:
        return ["end"]
    return []


@torch.no_grad()
def target_faults(targets: Tensor, expected: Tensor, tolerance: float) -> list[str]:
    """Faults (keys of FAULTS) found in value targets [T], compared with those from the recorded
    values [T]."""
    if bool(((targets - expected).abs() > tolerance).any()):
        return ["targets"]
    return []
