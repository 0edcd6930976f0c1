"""Faults of a critic that one batch gives away, by name. T tokens of S packed responses, in groups of one prompt."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vapo_megatron.algorithms.critic_metrics import calibration, correlation, returns_of_responses
from vapo_megatron.algorithms.segments import last_tokens, segment_mean, to_tokens

# What each fault means, for people. The keys are those of the metrics critic/fault_<name>.
FAULTS = {
    "constant": "values are all equal: a head that is frozen or zeroed",
    "frozen": "the value head gets no gradient, though values are not their targets: it is frozen, or left out",
    "sign": "values are low where responses end well: the sign of the reward, or of the value loss, is inverted",
    "scale": "values order responses but are far from their returns in size: something scales them (a temperature?)",
    "temperature": "values order states well and are all too large, or all too small, by one factor: something scales "
    "them",
    "shift": "responses to one prompt begin with different values, though in one state: values are shifted against "
    "their tokens",
    "end": "the last tokens of responses, where the reward is, carry no loss: EOS is left out",
    "mask": "most tokens of responses that carry loss are masked: the mask is inverted",
    "targets": "value targets are not those that the recorded values give: they were made after an update",
}


@torch.no_grad()
def value_faults(
    values: Tensor, returns: Tensor, cu_seqlens: Tensor, group_ids: Tensor, mask: Tensor | None = None
) -> list[str]:
    """Names in FAULTS of what is wrong with values [T] beside Monte-Carlo returns [T]; none for a critic that is sound.

    What is estimated counts where it is beyond three standard errors over responses.
    """
    kept = values if mask is None else values[mask != 0]
    if kept.numel() < 2:
        return []
    spread = float(kept.double().std(correction=0))
    if spread <= 1e-6 * max(1.0, float(kept.abs().mean())):
        return ["constant"]
    found = list(_estimated(values, returns, cu_seqlens, mask))
    # One state has one value, but for the rounding of bfloat16.
    rounding = max(0.1 * spread, 0.01 * float(kept.abs().max()))
    return [*found, "shift"] if sibling_gap(values, cu_seqlens, group_ids) > rounding else found


def _estimated(values: Tensor, returns: Tensor, cu_seqlens: Tensor, mask: Tensor | None) -> Iterator[str]:
    known = cu_seqlens.diff() > 0 if mask is None else segment_mean((mask != 0).double(), cu_seqlens) > 0
    responses = int(known.sum())
    mean_values = segment_mean(values.double(), cu_seqlens, mask)[known]
    found = float(correlation(mean_values, returns_of_responses(returns, cu_seqlens, mask)[known]))
    if responses < 32 or abs(found) < 3 / responses**0.5:
        return
    if found < 0:
        yield "sign"
        return
    slope = float(calibration(values, returns, mask).slope)
    # A critic that is still learning says too little, so that much is allowed on that side.
    if not 0.4 < slope < 4:
        yield "scale"


def sibling_gap(values: Tensor, cu_seqlens: Tensor, group_ids: Tensor) -> float:
    """Mean over responses of |V - mean of the group| at their first token; only rounding makes it more than 0."""
    starts = cu_seqlens[:-1].long()[cu_seqlens.diff() > 0]
    _, owner, sizes = torch.unique(group_ids[cu_seqlens.diff() > 0], return_inverse=True, return_counts=True)
    first = values[starts].double()
    means = first.new_zeros(sizes.numel()).index_add_(0, owner, first) / sizes
    shared = sizes[owner] > 1
    return float((first - means[owner]).abs()[shared].mean()) if bool(shared.any()) else 0.0


@torch.no_grad()
def loss_faults(weights: Tensor, selected: Tensor, cu_seqlens: Tensor) -> list[str]:
    """Names in FAULTS of what is wrong with loss weights [T], where the responses of selected, bool [S], carry loss."""
    of_selected = to_tokens(selected, cu_seqlens)
    counted = weights[of_selected] != 0
    if counted.numel() == 0:
        return []
    if float(counted.double().mean()) < 0.5:
        return ["mask"]
    responses, last = last_tokens(cu_seqlens)
    ends = weights[last[selected[responses]]] != 0
    return ["end"] if float(ends.double().mean()) < 0.5 else []


@torch.no_grad()
def target_faults(targets: Tensor, expected: Tensor, tolerance: float = 1e-3) -> list[str]:
    """Names in FAULTS of what is wrong with value targets [T] beside those that the recorded values give [T]."""
    return ["targets"] if bool(((targets - expected).abs() > tolerance).any()) else []
