"""Functions of one's own, one for each key that takes one; README.md beside this file says how a
config names them."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.sample import Sample
from vapo_megatron.training.user_functions import PolicyTerms, ScoredResponses


def number_after_hashes(
    problem: str, answer: str, response: str, extra: Mapping[str, Any]
) -> float:
    """1 where the number behind the last #### is the answer, 0.1 where it is another one, 0 where
    there is none.

    extra holds the fields of the row that data.fields.extra names.
    """
    found = re.findall(r"####\s*(-?\d+)", response)
    if not found:
        return 0.0
    return 1.0 if found[-1] == answer else 0.1


def reward_times_surprise(scored: ScoredResponses) -> Tensor:
    """Advantages [T]: the reward less the mean of its prompt's responses, spread over tokens by
    their entropy.

    Tokens at which the policy was undecided get most of the credit; over a response the weights
    have mean 1.
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
    """Responses [S] that carry loss: those that ended by themselves and have at least two
    tokens."""
    return ~scored.truncated & (scored.cu_seqlens.diff() >= 2)


def decoupled_ppo(terms: PolicyTerms) -> Tensor:
    """Loss of each token [t]: PPO's clip around the step's first policy, weighted for the older one
    that drew the token (decoupled PPO, as in AReaL, arXiv 2505.24298)."""
    weight = (terms.old_logprobs - terms.rollout_logprobs).exp().clamp(max=2.0)
    ratio = (terms.logprobs - terms.old_logprobs).exp()
    clipped = ratio.clamp(0.8, 1.28)
    return -weight * torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


def half_way_to_the_group(scored: ScoredResponses) -> tuple[Tensor, Tensor]:
    """Advantages [T] and value targets [T]: the reward less the value; the critic learns the mean
    of the reward and its group's mean, which is less noisy."""
    assert scored.values is not None, "needs a critic: advantage.estimator=gae"
    _, group = torch.unique(scored.group_ids, return_inverse=True)
    means = torch.zeros(int(group.max()) + 1).index_add_(0, group, scored.rewards) / torch.bincount(
        group
    )
    lengths = scored.cu_seqlens.diff()
    rewards = scored.rewards.repeat_interleave(lengths)
    targets = (0.5 * scored.rewards + 0.5 * means[group]).repeat_interleave(lengths)
    return rewards - scored.values, targets


def until_the_code_ends(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Tensor:
    """Tokens [response] that carry loss: those up to the end of the first block of code; all where
    there is none."""
    ids = sample.response_ids.tolist()
    start = sample.text.find("```")
    end = sample.text.find("```", start + 3)
    if start < 0 or end < 0:
        return torch.ones(len(ids), dtype=torch.bool)
    count = bisect_left(range(len(ids)), end + 3, key=lambda tokens: len(decode(ids[:tokens])))
    return torch.arange(len(ids)) < count


def where_credit_goes(scored: ScoredResponses) -> dict[str, float]:
    """Metrics of a step: mean |advantage| of undecided tokens and of the others, and the longest
    response."""
    assert scored.advantages is not None
    undecided = scored.entropies > scored.entropies.mean()
    size = scored.advantages.abs()
    return {
        "credit_of_undecided": float(size[undecided].mean()) if bool(undecided.any()) else 0.0,
        "credit_of_others": float(size[~undecided].mean()),
        "longest": float(scored.cu_seqlens.diff().max()),
    }
