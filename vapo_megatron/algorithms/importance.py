"""Weights for what the engine's and the trainer's policies differ by; constants that multiply the policy loss.

log_ratio is log pi_train - log pi_rollout: of each token, or of its response (`log_ratio_at`).
"""

from typing import Literal

import torch
from torch import Tensor

from vapo_megatron.algorithms.policy_loss import bounded_ratio
from vapo_megatron.algorithms.segments import segment_mean, segment_sum, to_tokens

Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def log_ratio_at(level: Level, train_logprobs: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """log pi_train / pi_rollout for every token [T], at the level asked for.

    token: the token's own; sequence: the sum over its response; geometric: the mean over its response.
    """
    log_ratio = train_logprobs - rollout_logprobs
    if level == "token":
        return log_ratio
    if level == "geometric":
        return to_tokens(segment_mean(log_ratio, cu_seqlens), cu_seqlens)
    return to_tokens(segment_sum(log_ratio, cu_seqlens), cu_seqlens)


@torch.no_grad()
def tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(log_ratio), cap): [T] -> [T]."""
    return bounded_ratio(log_ratio).clamp(max=cap)


@torch.no_grad()
def mis(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Masked importance weights: exp(log_ratio) where it lies in [low, high], else 0: [T] -> [T].

    At the level of tokens it is IcePop's mask (INTELLECT-3, arXiv 2512.16144, eq. 1).
    """
    return torch.where(inside(log_ratio, low, high), bounded_ratio(log_ratio), 0)


@torch.no_grad()
def inside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Whether exp(log_ratio) lies in [low, high]: [T] -> bool [T].

    A log ratio of the response ("sequence", "geometric") accepts or rejects whole responses.
    """
    ratio = bounded_ratio(log_ratio)
    return (ratio >= low) & (ratio <= high)


def whole_responses(accepted: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Tokens of responses all of whose tokens are accepted: bool [T] -> bool [T].

    One token outside the band rejects its response.
    """
    return to_tokens(segment_sum((~accepted).long(), cu_seqlens) == 0, cu_seqlens)
