"""Weights for what the engine's and the trainer's policies differ by; constants that multiply the policy loss.

log_ratio is log pi_train - log pi_rollout: of each token, or of its response (`log_ratio_at`).
"""

from typing import Literal

import torch
from torch import Tensor

from vapo_megatron.algorithms.policy_loss import MAX_LOG_RATIO
from vapo_megatron.algorithms.segments import segment_mean, segment_sum, to_tokens

Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def log_ratio_at(
    level: Level, train_logprobs: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None
) -> Tensor:
    """log pi_train / pi_rollout for every token [T], at the level asked for.

    token: the token's own; sequence: the sum over its response; geometric: the mean over its response.
    Tokens whose mask is 0 take no part in sum and mean.
    """
    log_ratio = train_logprobs - rollout_logprobs
    if level == "token":
        return log_ratio
    if level == "geometric":
        return to_tokens(segment_mean(log_ratio, cu_seqlens, mask), cu_seqlens)
    if mask is not None:
        log_ratio = torch.where(mask != 0, log_ratio, 0)
    return to_tokens(segment_sum(log_ratio, cu_seqlens), cu_seqlens)


@torch.no_grad()
def tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(log_ratio), cap): [T] -> [T]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


@torch.no_grad()
def mis(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Masked importance weights: exp(log_ratio) where it lies in [low, high], else 0: [T] -> [T]."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)
