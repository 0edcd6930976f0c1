"""The losses of one optimizer step, as Megatron's schedule wants them: sums over local positions, denominators inside.

Each holds tensors over the whole batch's response tokens [T]; what lies outside the mini-batch has weight 0. The
formulas are those of vapo_megatron.algorithms; here they only meet the layout through `take`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vapo_megatron.algorithms.policy_loss import ppo_clip
from vapo_megatron.algorithms.value_loss import clipped_value_loss, value_mse

Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """L = L_PPO + mu L_NLL - c H (VAPO, sections 3.3 and 3.4).

    weights and nll_weights hold the aggregation and its global denominators; mean_weights is 1 / N on the N tokens of
    the mini-batch, for the figures.
    """

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    nll_weights: Tensor
    mean_weights: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    nll_coef: float = 0.0
    entropy_coef: float = 0.0

    sums: ClassVar = (
        "policy_loss",
        "nll_loss",
        "entropy",
        "clip_fraction_low",
        "clip_fraction_high",
        "ratio_mean",
        "approx_kl",
    )
    maxima: ClassVar = ("ratio_max",)

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        logprobs, entropies = outputs.unbind(-1)
        old, advantages, weights = take(self.old_logprobs), take(self.advantages), take(self.weights)
        nll_weights, mean = take(self.nll_weights), take(self.mean_weights)
        surrogate = ppo_clip(logprobs, old, advantages, self.clip_low, self.clip_high, self.dual_clip)
        policy, nll = (weights * surrogate).sum(), -(nll_weights * logprobs).sum()
        loss = policy + self.nll_coef * nll - self.entropy_coef * (weights * entropies).sum()
        with torch.no_grad():
            log_ratio = torch.where(mean > 0, logprobs - old, torch.zeros_like(old))
            ratio = log_ratio.exp()
            figures = {
                "policy_loss": policy.detach(),
                "nll_loss": nll.detach(),
                "entropy": (mean * entropies).sum(),
                "clip_fraction_low": (mean * ((ratio < 1 - self.clip_low) & (advantages < 0))).sum(),
                "clip_fraction_high": (mean * ((ratio > 1 + self.clip_high) & (advantages > 0))).sum(),
                "ratio_mean": (mean * ratio).sum(),
                "approx_kl": (mean * (ratio - 1 - log_ratio)).sum(),
                "ratio_max": ratio.max(),
            }
        return loss, figures


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared distance to the value targets, a mean over the mini-batch's tokens."""

    targets: Tensor
    old_values: Tensor
    weights: Tensor
    clip: float | None = None

    sums: ClassVar = ("value_loss",)
    maxima: ClassVar = ()

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 1]: values."""
        values, targets = outputs[:, 0], take(self.targets)
        if self.clip is None:
            per_token = value_mse(values, targets)
        else:
            per_token = clipped_value_loss(values, take(self.old_values), targets, self.clip)
        loss = (take(self.weights) * per_token).sum()
        return loss, {"value_loss": loss.detach()}


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: the mean over the batch's response tokens."""

    weights: Tensor

    sums: ClassVar = ("nll_loss", "entropy")
    maxima: ClassVar = ()

    def __call__(self, outputs: Tensor, take: Take) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        weights = take(self.weights)
        loss = -(weights * outputs[:, 0]).sum()
        return loss, {"nll_loss": loss.detach(), "entropy": (weights * outputs[:, 1]).sum().detach()}
