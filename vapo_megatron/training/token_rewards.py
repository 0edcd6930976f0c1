"""What a batch's rewards are, by response and by token, and which responses have a return and teach
the critic."""

import torch
from torch import Tensor

from vapo_megatron.algorithms import shaping
from vapo_megatron.algorithms.kl import k1
from vapo_megatron.algorithms.prefix_features import so_far
from vapo_megatron.algorithms.segments import place_terminal, segment_sum, tokens_from
from vapo_megatron.config.algorithm import AlgorithmConfig, ShapingConfig
from vapo_megatron.config.policy import KlConfig
from vapo_megatron.data.batch import ExperienceBatch, SampleTable


def shaped_rewards(batch: ExperienceBatch | SampleTable, config: ShapingConfig) -> Tensor:
    """The verifier's rewards plus the penalty on long responses, float32 [S]."""
    rewards = batch.rewards.clone()
    limits = config.soft_overlong
    if limits is not None:
        rewards += shaping.soft_overlong(
            batch.response_lengths, limits.max_length, limits.cache_length
        )
    return rewards


def token_rewards(batch: ExperienceBatch, config: AlgorithmConfig) -> Tensor:
    """Token rewards, float32 [T]: rewards of earlier turns where they were given, the rest of the
    shaped reward on the last token, minus the KL penalty of each token. A truncated response that
    is bootstrapped from a value has no reward at its end."""
    rewards = batch.shaped_rewards
    assert rewards is not None, "no shaped rewards: estimate_advantages comes first"
    earlier = batch.turn_rewards
    bounds = batch.response_cu_seqlens
    if config.shaping.bootstraps:
        before = 0 if earlier is None else segment_sum(earlier, bounds)
        rewards = torch.where(batch.truncated, before, rewards)
    placed = place_terminal(rewards, bounds, batch.response_tokens, earlier)
    return placed - kl_penalty(batch, config.kl)


def paid(batch: ExperienceBatch) -> Tensor:
    """The rewards that a response got before each token: float64 [T]."""
    if batch.turn_rewards is None:
        return torch.zeros(batch.response_tokens, dtype=torch.float64)
    return so_far(batch.turn_rewards, batch.response_cu_seqlens)


def kl_penalty(batch: ExperienceBatch, config: KlConfig) -> Tensor:
    """The KL penalty that is subtracted from each token's reward, float32 [T]."""
    if config.placement != "reward":
        return torch.zeros(batch.response_tokens)
    old = batch.old_logprobs
    reference = batch.ref_logprobs
    assert old is not None and reference is not None, "no log-probs: the batch is not scored"
    return config.coef * k1(old, reference)


def returns_known(truncated: Tensor, config: ShapingConfig) -> Tensor:
    """Responses with a Monte-Carlo return, bool [S]: a truncated one has none unless it counts as
    incorrect."""
    if config.truncated == "terminal":
        return torch.ones_like(truncated)
    return ~truncated


def teaches_critic(batch: ExperienceBatch | SampleTable, config: ShapingConfig) -> Tensor:
    """The responses that the critic learns from, bool [S], among those that carry loss."""
    selected = batch.selected
    assert selected is not None, "nothing is selected: estimate_advantages comes first"
    if config.truncated == "window":
        return selected & ~batch.truncated
    return selected


def new_tokens(batch: ExperienceBatch) -> Tensor | None:
    """The response tokens that no earlier window has trained on, bool [T]; None: all of them."""
    if batch.window_starts is None:
        return None
    return tokens_from(batch.window_starts, batch.response_cu_seqlens)
