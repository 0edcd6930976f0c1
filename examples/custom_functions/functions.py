"""A reward, an advantage and a filter of one's own; README.md beside this file says how a config names them."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.training.user_functions import ScoredResponses


def number_after_hashes(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> float:
    """1 where the number behind the last #### is the answer, 0.1 where it is another one, 0 where there is none.

    extra holds the fields of the row that data.fields.extra names.
    """
    found = re.findall(r"####\s*(-?\d+)", response)
    if not found:
        return 0.0
    return 1.0 if found[-1] == answer else 0.1


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
