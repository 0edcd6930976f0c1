"""The losses of one optimizer step, as Megatron's schedule wants them: sums over local positions, denominators inside.

Each holds tensors over the whole batch's response tokens [T]; what lies outside the mini-batch has weight 0. The
formulas are those of vapo_megatron.algorithms; here they only meet the layout through `take`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vapo_megatron.algorithms import policy_loss, value_loss
from vapo_megatron.config.algorithm import PolicyLossConfig, ValueLossConfig

Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """L = L_policy + mu L_NLL - c H + self-imitation (VAPO, sections 3.3 and 3.4).

    weights and nll_weights hold the aggregation and its global denominators; mean_weights is 1 / N on the N tokens of
    the mini-batch, for the figures.
    """

    config: PolicyLossConfig
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    positive_advantages: Tensor
    weights: Tensor
    nll_weights: Tensor
    mean_weights: Tensor

    sums: ClassVar[Sequence[str]] = (
        "policy_loss",
        "nll_loss",
        "update_entropy",
        "clip_fraction_low",
        "clip_fraction_high",
        "ratio_mean",
        "approx_kl",
    )
    maxima: ClassVar[Sequence[str]] = ("ratio_max",)

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        config = self.config
        logprobs, entropies = outputs.unbind(-1)
        old, advantages, weights = take(self.old_logprobs), take(self.advantages), take(self.weights)
        mean = take(self.mean_weights)
        policy = (weights * self._surrogate(logprobs, old, advantages, take)).sum()
        nll = -(take(self.nll_weights) * logprobs).sum()
        loss = policy + config.positive_nll.coef * nll
        if config.entropy_coef:
            loss = loss + config.entropy_coef * (weights * policy_loss.entropy_bonus(entropies)).sum()
        if config.self_imitation_coef:
            imitation = policy_loss.self_imitation(logprobs, take(self.positive_advantages))
            loss = loss + config.self_imitation_coef * (weights * imitation).sum()
        with torch.no_grad():
            log_ratio = torch.where(mean > 0, logprobs - old, torch.zeros_like(old))
            ratio = log_ratio.exp()
            low, high, _ = policy_loss.clip_indicators(log_ratio, advantages, config.clip_low, config.clip_high)
            figures = {
                "policy_loss": policy.detach(),
                "nll_loss": nll.detach(),
                "update_entropy": (mean * entropies).sum(),
                "clip_fraction_low": (mean * low).sum(),
                "clip_fraction_high": (mean * high).sum(),
                "ratio_mean": (mean * ratio).sum(),
                "approx_kl": (mean * (ratio - 1 - log_ratio)).sum(),
                "ratio_max": ratio.max(),
            }
        return loss, figures

    def _surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, take: Take) -> Tensor:
        config = self.config
        if config.kind == "reinforce":
            return policy_loss.reinforce(logprobs, advantages)
        if config.kind == "cispo":
            return policy_loss.cispo(logprobs, old, advantages, config.clip_high)
        if config.kind == "sao":
            rollout = take(self.rollout_logprobs)
            return policy_loss.sao(logprobs, rollout, advantages, config.clip_low, config.clip_high)
        return policy_loss.ppo_clip(logprobs, old, advantages, config.clip_low, config.clip_high, config.dual_clip)


@dataclass(frozen=True)
class ValueLoss:
    """The distance to the value targets, a mean over the mini-batch's tokens."""

    config: ValueLossConfig
    targets: Tensor
    old_values: Tensor
    weights: Tensor

    sums: ClassVar[Sequence[str]] = ("value_loss",)
    maxima: ClassVar[Sequence[str]] = ()

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 1]: values."""
        values, targets, weights = outputs[:, 0], take(self.targets), take(self.weights)
        if self.config.kind == "clipped":
            per_token = value_loss.clipped_value_loss(values, take(self.old_values), targets, self.config.clip)
        else:
            per_token = value_loss.value_mse(values, targets)
        loss = (weights * per_token).sum()
        figures = {"value_loss": loss.detach()}
        if self.config.self_imitation_coef:
            imitation = value_loss.self_imitation_value_loss(values, targets)
            loss = loss + self.config.self_imitation_coef * (weights * imitation).sum()
        return loss, figures


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: the mean over the batch's response tokens."""

    weights: Tensor

    sums: ClassVar[Sequence[str]] = ("nll_loss", "entropy")
    maxima: ClassVar[Sequence[str]] = ()

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        weights = take(self.weights)
        loss = -(weights * outputs[:, 0]).sum()
        return loss, {"nll_loss": loss.detach(), "entropy": (weights * outputs[:, 1]).sum().detach()}
