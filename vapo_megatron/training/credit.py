"""How far credit reaches, by the config: lambda of each response, the turns of an episode, and the
returns that follow."""

import torch
from torch import Tensor

from vapo_megatron.algorithms.gae import (
    length_adaptive_lambda,
    segmented_gae,
    turn_bounds,
    turn_gae,
)
from vapo_megatron.config.algorithm import AdvantageConfig, Lambda
from vapo_megatron.data.batch import ExperienceBatch


def policy_lambda(lengths: Tensor, config: AdvantageConfig) -> Tensor:
    """The lambda of the advantages of responses of these lengths, float32 [S]."""
    return lambda_of(config.lambda_policy, lengths, config)


def lambda_of(choice: Lambda, lengths: Tensor, config: AdvantageConfig) -> Tensor:
    """The lambda of responses of these lengths, float32 [S]."""
    if choice == "length_adaptive":
        return length_adaptive_lambda(
            lengths, config.length_adaptive_alpha, config.length_adaptive_floor
        )
    return torch.full((len(lengths),), float(choice))


def clamped(lam: Tensor, config: AdvantageConfig) -> float:
    """Share of responses so short that their length-adaptive lambda is at its lower bound."""
    if config.lambda_policy != "length_adaptive":
        return 0.0
    return float((lam <= config.length_adaptive_floor).float().mean())


def turns_of(batch: ExperienceBatch) -> tuple[Tensor, Tensor]:
    """Bounds of turns among response tokens, and of responses among turns: int64 [U + 1], [S +
    1]."""
    if batch.loss_mask is None:
        return batch.response_cu_seqlens, torch.arange(batch.samples + 1)
    return turn_bounds(batch.loss_mask.nonzero().squeeze(1), batch.response_cu_seqlens)


def returns_of(
    batch: ExperienceBatch, rewards: Tensor, config: AdvantageConfig, of: Tensor | None = None
) -> Tensor:
    """Monte-Carlo returns, the value targets of lambda = 1: float32 [T]. With credit=turn those of
    the turn's first state, discounted by turns.

    rewards: float32 [T]; of: as in segmented_gae().
    """
    nothing = torch.zeros_like(rewards)
    if config.credit == "turn":
        turns, responses = turns_of(batch)
        _, returns = turn_gae(rewards, nothing, turns, responses, 1.0, 1.0, config.gamma)
        return returns
    return segmented_gae(rewards, nothing, batch.response_cu_seqlens, 1.0, config.gamma, of=of)
