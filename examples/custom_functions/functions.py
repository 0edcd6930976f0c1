"""An advantage estimator and a filter of one's own; README.md beside this file says how they are named in a config."""

import torch
from torch import Tensor

from vapo_megatron.training.user_functions import ScoredResponses


def reward_times_surprise(scored: ScoredResponses) -> Tensor:
    """Advantages [T]: the reward less the mean of its prompt's responses, spread over tokens by their entropy.

    Tokens at which the policy was undecided get most of the credit; over a response the weights have mean 1.
    """
    _, group = torch.unique(scored.group_ids, return_inverse=True)
    sizes = torch.bincount(group).float()
    means = torch.zeros_like(sizes).index_add_(0, group, scored.rewards) / sizes
    centred = scored.rewards - means[group]
    lengths = scored.cu_seqlens.diff()
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    total = torch.zeros(len(lengths)).index_add_(0, owner, scored.entropies)
    weights = scored.entropies * lengths[owner] / total.clamp(min=1e-6)[owner]
    return centred[owner] * weights


def finished_and_not_too_short(scored: ScoredResponses) -> Tensor:
    """Responses [S] that carry loss: those that ended by themselves and have at least two tokens."""
    return ~scored.truncated & (scored.cu_seqlens.diff() >= 2)
