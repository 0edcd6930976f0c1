"""Advantages from one reward per response, compared with the other responses to its prompt.

The trainer (training/advantages.py) calls a registered estimator with what its parameters are named
after: rewards, group_ids, lengths (tokens that carry loss) and greedy_rewards, each [S], of all
    ranks.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import grouped, leave_one_out, siblings_mean
from vapo_megatron.algorithms.gae import segmented_gae
from vapo_megatron.algorithms.kl import k1
from vapo_megatron.algorithms.registry import estimator
from vapo_megatron.algorithms.segments import place_terminal, segment_sum


@estimator("grpo", groups=True)
def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """(R - mean) / (std + eps) in each group, std unbiased (GRPO, arXiv 2402.03300; DAPO, arXiv
    2503.14476, eq. 9).

    rewards [S] floating point, group_ids int64 [S]. A group of one has mean 0 and std 1.
    Returns [S], dtype of rewards. Raises ValueError where the shapes differ.
    """
    owner, sizes, sums = grouped(rewards, group_ids)
    single = sizes == 1
    centred = rewards - torch.where(single, 0, sums / sizes)
    squares = centred.new_zeros(centred.shape).index_add_(0, owner, centred.square())[owner]
    std = torch.where(single, 1, (squares / (sizes - 1).clamp(min=1)).sqrt())
    return (centred / (std + eps)).to(rewards.dtype)


@estimator("dr_grpo", groups=True)
@estimator("group_baseline", groups=True)
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean of the group (Dr. GRPO, arXiv 2503.20783, section 3.2). A group of one gets 0. [S],
    [S] -> [S]."""
    _, sizes, sums = grouped(rewards, group_ids)
    return (rewards - sums / sizes).to(rewards.dtype)


# To be whitened over the batch it is REINFORCE++-baseline's (arXiv 2501.03262).
group_baseline = dr_grpo


@estimator("rloo", groups=True)
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, eq. 8).

    A group of one has no others: its baseline is 0. [S], [S] -> [S].
    """
    return (rewards - siblings_mean(rewards, group_ids)).to(rewards.dtype)


@estimator("batch_baseline")
def batch_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean reward of the other responses of the group, or of the batch for a group of one. [S],
    [S] -> [S]."""
    return (rewards - leave_one_out(rewards, group_ids)).to(rewards.dtype)


@estimator("remax", greedy=True)
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """R(y) - R(greedy answer to the same prompt) (ReMax, arXiv 2310.10505, algorithm 1). [S], [S]
    -> [S]."""
    return rewards - greedy_rewards


@estimator("raft", groups=True, selects=True)
def raft(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """1 for the best response of each group (the first among equals), 0 for the others (RAFT, arXiv
    2304.06767).

    Responses with 0 are left out of the loss and of its denominators. [S], [S] -> [S].
    """
    index, _, _ = grouped(rewards, group_ids)
    best = rewards.new_full(rewards.shape, -torch.inf).scatter_reduce_(0, index, rewards, "amax")[
        index
    ]
    position = torch.arange(rewards.numel(), device=rewards.device)
    candidate = position.masked_fill(rewards < best, rewards.numel())
    first = candidate.new_full(rewards.shape, rewards.numel()).scatter_reduce_(
        0, index, candidate, "amin"
    )[index]
    return (position == first).to(rewards.dtype)


@estimator("reinforce_pp", per_token=True, discounts=True)
@torch.no_grad()
def reinforce_pp(
    rewards: Tensor,
    penalty: Tensor,
    cu_seqlens: Tensor,
    gamma: float = 1.0,
    of: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """A_t = R - sum over i >= t of the KL penalty of token i (REINFORCE++, arXiv 2501.03262, eq.
    6), to be whitened.

    rewards [S]; penalty [T]; of as in `segmented_gae`; earlier as in `place_terminal`. Returns [T].
    """
    placed = place_terminal(rewards, cu_seqlens, penalty.numel(), earlier)
    return segmented_gae(placed - penalty, torch.zeros_like(penalty), cu_seqlens, 1.0, gamma, of=of)


def distilled(advantages: Tensor, logprobs: Tensor, ref_logprobs: Tensor, coef: float) -> Tensor:
    """A_t - coef (log pi - log pi_teacher) of the sampled token: on-policy distillation (Lu and
    Thinking Machines Lab, 2025), the reverse KL of each token undiscounted. All [T]."""
    return advantages - coef * k1(logprobs, ref_logprobs)


def whitening_sums(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number, sum and sum of squares of each response's tokens whose mask is not 0: [T], [T] ->
    float64 [S, 3]."""
    kept = torch.where(mask != 0, x, 0).double()
    columns = (mask != 0).double(), kept, kept.square()
    return torch.stack([segment_sum(column, cu_seqlens) for column in columns], dim=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, sums: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the tokens whose mask is not 0; var unbiased.

    Args:
        x: [T] advantages (returns are never whitened).
        mask: [T]; tokens with 0 are not counted and get 0.
        shift_mean: False scales and adds the mean back.
        sums: float64 [S, 3], whitening_sums of all responses, if these are only a part of them;
            None: these are all.

    Returns:
        [T], dtype of x. With fewer than two tokens the variance counts as 0.
    """
    if sums is None:
        sums = whitening_sums(x, mask, torch.tensor([0, x.numel()]))
    count, total, squares = sums.sum(0)
    mean = total / count.clamp(min=1)
    variance = ((squares - count * mean.square()) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (x - mean) / (variance + 1e-8).sqrt()
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask != 0, whitened, 0)
