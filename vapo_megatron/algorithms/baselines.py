"""Free baselines, which a critic has to beat.

They are cross-fitted: a token's baseline is computed without its own response, so that no baseline
looks good by memorising it. float64.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.segments import to_tokens

TRACKER_FADE = 0.875
TRACKER_PRIOR = 1.0  # responses that the prior mean is worth


def grouped(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each response's group number (from 0), group size and sum of the group's rewards: int64,
    int64, float64 [S].

    Raises ValueError where the shapes are not [S].
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must be [S], got {list(rewards.shape)} and "
            f"{list(group_ids.shape)}"
        )
    _, owner, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    # In float64 a sum of equal float32 rewards is exact, so that equal rewards are equal to their
    # baseline.
    sums = rewards.new_zeros(sizes.numel(), dtype=torch.float64).index_add_(
        0, owner, rewards.double()
    )
    return owner, sizes[owner], sums[owner]


def siblings_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean reward of the other responses of the group (RLOO, arXiv 2402.14740, eq. 8), 0 for a
    response without any: [S], int64 [S] -> float64 [S]."""
    _, sizes, sums = grouped(rewards, group_ids)
    return (sums - rewards) / (sizes - 1).clamp(min=1)


def known_siblings_mean(
    rewards: Tensor, group_ids: Tensor, known: Tensor, otherwise: float
) -> Tensor:
    """Mean reward of those other responses of the group whose reward is known; `otherwise` without
    any.

    [S], int64 [S], bool [S] -> float64 [S]. Responses whose own reward is not known have a mean,
    too.
    """
    counted = rewards.double() * known
    _, _, sums = grouped(counted, group_ids)
    _, _, sizes = grouped(known.double(), group_ids)
    others = sizes - known.double()
    means = (sums - counted) / others.clamp(min=1)
    return torch.where(others > 0, means, otherwise)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """siblings_mean(); a response without siblings is compared with all others of the batch:
    float64 [S].

    A response that is alone in the batch is compared with 0.
    """
    _, sizes, _ = grouped(rewards, group_ids)
    of_batch = (rewards.double().sum() - rewards) / max(1, rewards.numel() - 1)
    return torch.where(sizes > 1, siblings_mean(rewards, group_ids), of_batch)


def positions(cu_seqlens: Tensor) -> Tensor:
    """The number of its response's tokens before each token: int64 [T]."""
    bounds = cu_seqlens.long()
    return torch.arange(int(bounds[-1]), device=bounds.device) - to_tokens(bounds[:-1], bounds)


def bins_of_positions(lengths: Tensor, bins: int) -> Tensor:
    """The bin of each position up to the longest response's last, with about equally many tokens
    per bin: int64.

    Positions count the tokens before a state, which it knows, unlike the length of its response.
    lengths: int64 [S].
    """
    if lengths.numel():
        longest = int(lengths.max())
    else:
        longest = 0
    if not longest:
        return torch.zeros(1, dtype=torch.int64)
    ending = torch.bincount(lengths)
    return _even(lengths.numel() - ending.cumsum(0)[:-1], bins)


def even_bins(positions: Tensor, bins: int) -> Tensor:
    """Bins of about equally many tokens, by position, int64 [T] -> int64 [T]."""
    if positions.numel() == 0:
        return torch.zeros_like(positions)
    return _even(torch.bincount(positions), bins)[positions]


def _even(counts: Tensor, bins: int) -> Tensor:
    # All tokens of a position share one bin, chosen by the share of tokens before it.
    earlier = counts.cumsum(0) - counts
    return earlier * bins // counts.sum()


def sums_by_group(x: Tensor, bin_of: Tensor, group: Tensor, bins: int, groups: int) -> Tensor:
    """Sums of x [T] and numbers of tokens in each bin of each group: float64 [2, bins, groups].
    bin_of and group are int64 [T]."""
    cell = bin_of * groups + group
    x = x.double()
    totals_and_counts = [
        torch.bincount(cell, w, minlength=bins * groups) for w in (x, torch.ones_like(x))
    ]
    return torch.stack(totals_and_counts).view(2, bins, groups)


def means_of_other_groups(found: Tensor) -> Tensor:
    """Mean in the same bin over all other groups, from sums_by_group: float64 [bins, groups]; where
    no other group has the bin, the mean of all others."""
    others = found.sum(2, keepdim=True) - found
    anywhere = others.sum(1)
    fallback = anywhere[0] / anywhere[1].clamp(min=1)
    return torch.where(others[1] > 0, others[0] / others[1].clamp(min=1), fallback)


def tracked_values(sums: Tensor, weights: Tensor, prior: float | Tensor) -> Tensor:
    """The value of each prompt before its next response (SPO's tracker, arXiv 2509.13232, section
    3.1).

    The posterior mean of its return, whose evidence fades each time the prompt is answered. SPO
    fades it by how far the policy has moved since; here the factor is a constant, the lower end of
    its range.

    Args:
        sums, weights: float64 [...], faded sums of returns and of responses; 0 for a prompt that
            was never answered.
        prior: the value of such a prompt, a scalar or [...].

    Returns:
        float64 [...].
    """
    return (sums + TRACKER_PRIOR * prior) / (weights + TRACKER_PRIOR)


def with_responses(
    sums: Tensor, weights: Tensor, returns: Tensor, responses: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums and weights after a step.

    Args:
        sums, weights: float64 [P], of the prompts that the step answered.
        returns: float64 [P], sum of the returns of each prompt's responses.
        responses: float64 [P], the number of each prompt's responses.
    """
    return TRACKER_FADE * sums + returns, TRACKER_FADE * weights + responses
