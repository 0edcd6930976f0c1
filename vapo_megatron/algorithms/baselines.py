"""What a response can be compared with for nothing, without a critic: the measure that a critic has to beat.

Both are cross-fitted: what a token is compared with was made without its own response, so that neither can look good by
remembering it. float64.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.segments import response_lengths, to_tokens


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean reward of the other responses of the group (RLOO, arXiv 2402.14740, eq. 8): [S], int64 [S] -> float64 [S].

    A response without siblings is compared with all others of the batch; one that is alone there with 0.
    """
    _, owner, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    # In float64 a sum of equal float32 rewards is exact, so that equal rewards are equal to their baseline.
    rewards = rewards.double()
    sums = rewards.new_zeros(sizes.numel()).index_add_(0, owner, rewards)[owner]
    others = sizes[owner] - 1
    of_group = (sums - rewards) / others.clamp(min=1)
    of_batch = (rewards.sum() - rewards) / max(1, rewards.numel() - 1)
    return torch.where(others > 0, of_group, of_batch)


def positions(cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """How many tokens of its response stand before each token: int64 [T].

    With a mask [T] those that it leaves out (0) are not counted.
    """
    kept = torch.ones(int(cu_seqlens[-1]), dtype=torch.int64) if mask is None else (mask != 0).long().cpu()
    before = torch.cat((kept.new_zeros(1), kept.cumsum(0)))
    bounds = cu_seqlens.long().cpu()
    found = before[:-1] - to_tokens(before[bounds[:-1]], bounds)
    return found if mask is None else found.to(mask.device)


def position_bins(cu_seqlens: Tensor, bins: int, relative: bool = False, mask: Tensor | None = None) -> Tensor:
    """The bin of each token by where it stands in its response: int64 [T], each in 0 .. bins - 1.

    relative: equal parts of the response. Else by the number of tokens before it, which is what a state knows of where
    it is (how long the response will be it does not), in bins of about equally many tokens.
    """
    position = positions(cu_seqlens, mask)
    if relative:
        lengths = to_tokens(response_lengths(cu_seqlens, mask), cu_seqlens).to(position.device)
        return (position * bins // lengths.clamp(min=1)).clamp(max=bins - 1)
    return even_bins(position, bins, mask)


def even_bins(positions: Tensor, bins: int, mask: Tensor | None = None) -> Tensor:
    """Bins of about equally many of the tokens whose mask is not 0, by position, int64 [T] -> int64 [T]."""
    counted = positions if mask is None else positions[mask != 0]
    if counted.numel() == 0:
        return torch.zeros_like(positions)
    # A whole position is in one bin: that of the share of tokens which stand earlier.
    counts = torch.bincount(counted)
    earlier = counts.cumsum(0) - counts
    bin_of = (earlier * bins // counted.numel()).clamp(max=bins - 1)
    return bin_of[positions.clamp(max=counts.numel() - 1)]


def by_position(
    returns: Tensor, cu_seqlens: Tensor, group_ids: Tensor, bins: int = 32, mask: Tensor | None = None
) -> Tensor:
    """Mean return at the same position in the responses of all other groups: float64 [T].

    A table over `position_bins`, fitted without the group of the response that is looked up: its siblings share its
    prompt. A bin that nobody else fills has the mean return of all other groups; a group that is alone has that of its
    other responses, and a response that is alone 0.
    """
    _, owner = torch.unique(group_ids, return_inverse=True)
    groups = int(owner.max()) + 1 if owner.numel() else 0
    if groups == 1:
        owner, groups = torch.arange(owner.numel(), device=owner.device), owner.numel()
    return mean_of_other_groups(
        returns, position_bins(cu_seqlens, bins, mask=mask), to_tokens(owner, cu_seqlens), bins, groups, mask
    )


def mean_of_other_groups(
    x: Tensor, bin_of: Tensor, group: Tensor, bins: int, groups: int, mask: Tensor | None = None
) -> Tensor:
    """Mean of x [T] in the same bin over all other groups: float64 [T].

    bin_of and group are int64 [T], below bins and groups; where no other group has the bin, the mean of all others.
    """
    kept = torch.ones_like(x, dtype=torch.float64) if mask is None else (mask != 0).double()
    weighted = x.double() if mask is None else torch.where(mask != 0, x.double(), 0)
    cell = bin_of * groups + group
    sums, counts = (torch.bincount(cell, x, minlength=bins * groups).view(bins, groups) for x in (weighted, kept))
    others = (sums.sum(1, keepdim=True) - sums, counts.sum(1, keepdim=True) - counts)
    anywhere = (others[0].sum(0, keepdim=True), others[1].sum(0, keepdim=True))
    fallback = anywhere[0] / anywhere[1].clamp(min=1)
    table = torch.where(others[1] > 0, others[0] / others[1].clamp(min=1), fallback)
    return table.flatten()[cell]
