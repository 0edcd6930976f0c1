"""The losses of one optimizer step as Megatron's schedule expects them: sums over local positions,
already weighted.

Each holds tensors over the whole batch's response tokens [T]; what lies outside the mini-batch has
weight 0. The formulas live in vapo_megatron.algorithms; this module applies them to a layout
through LocalTokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vapo_megatron.algorithms import kl, value_loss
from vapo_megatron.algorithms.policy_loss import (
    Clip,
    ClipIndicators,
    PolicyTerms,
    TokenLosses,
    bounded_ratio,
)
from vapo_megatron.algorithms.registry import POLICY_LOSSES
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.megatron.token_loss import LocalTokens
from vapo_megatron.training.user_functions import user_policy_loss


@dataclass(frozen=True)
class PolicyLoss:
    """L = L_policy + mu L_NLL + beta KL - c H (VAPO, sections 4.2 and 4.3; GRPO, eq. 3).

    weights and nll_weights hold the aggregation and its global denominators; mean_weights is 1 / N
    on the N tokens of the mini-batch, for the metrics. old_logprobs come from the policy
    before the first update; None if this forward pass computes them: every ratio is then 1 and its
    gradient equals the log-prob's. importance corrects the policy loss alone for the
    engine's policy. values are the critic's; None without one.
    """

    config: PolicyLossConfig
    kl: KlConfig
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    importance: Tensor
    weights: Tensor
    nll_weights: Tensor
    mean_weights: Tensor
    values: Tensor | None = None

    maxima: ClassVar[Sequence[str]] = ("ratio_max",)

    @property
    def sums(self) -> Sequence[str]:
        """Metrics summed over ranks, without the metrics of disabled loss terms."""
        sums = [
            "policy_loss",
            "nll_loss",
            "update_entropy",
            "clip_fraction_low",
            "clip_fraction_high",
            "ratio_mean",
            "approx_kl",
        ]
        if self.config.dual_clip is not None:
            sums.append("clip_fraction_dual")
        if self.kl.placement == "loss":
            sums.append("kl_loss")
        return sums

    def __call__(self, outputs: Tensor, local: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        config = self.config
        gather = local.gather
        logprobs, entropies = outputs.unbind(-1)
        weights = gather(self.weights)
        tokens = self._token_losses(logprobs, entropies, weights, local)
        parts = {
            "policy_loss": (weights * gather(self.importance) * tokens.losses).sum(),
            "nll_loss": -(gather(self.nll_weights) * logprobs).sum(),
        }
        loss = parts["policy_loss"] + config.positive_nll.coef * parts["nll_loss"]
        if self.kl.placement == "loss":
            estimate = {"k2": kl.k2, "k3": kl.k3}[self.kl.estimator]
            parts["kl_loss"] = (weights * estimate(logprobs, gather(self.ref_logprobs))).sum()
            loss = loss + self.kl.coef * parts["kl_loss"]
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (weights * entropies).sum()
        metrics = {name: part.detach() for name, part in parts.items()}
        metrics |= self._metrics(logprobs.detach(), entropies.detach(), tokens.clipped, local)
        return loss, metrics

    def _token_losses(
        self, logprobs: Tensor, entropies: Tensor, weights: Tensor, local: LocalTokens
    ) -> TokenLosses:
        config = self.config
        gather = local.gather
        old = self._old(logprobs, local)
        per_sequence = config.traits.per_sequence
        terms = PolicyTerms(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=old,
            rollout_logprobs=gather(self.rollout_logprobs),
            ref_logprobs=gather(self.ref_logprobs) if self.kl.placement != "none" else None,
            advantages=gather(self.advantages),
            values=None if self.values is None else gather(self.values),
            mask=weights > 0,
            sequence_log_ratio=local.sequence_mean(logprobs - old) if per_sequence else None,
        )
        if config.function is not None:
            return TokenLosses(user_policy_loss(config.function, terms))
        clip = Clip(config.clip_low, config.clip_high, config.dual_clip)
        losses: TokenLosses = POLICY_LOSSES.formula(config.kind)(terms, clip)
        return losses

    def _old(self, logprobs: Tensor, local: LocalTokens) -> Tensor:
        if self.old_logprobs is None:
            return logprobs.detach()
        return local.gather(self.old_logprobs)

    @torch.no_grad()
    def _metrics(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        clipped: ClipIndicators | None,
        local: LocalTokens,
    ) -> dict[str, Tensor]:
        mean = local.gather(self.mean_weights)
        old = self._old(logprobs, local)
        log_ratio = torch.where(mean > 0, logprobs - old, 0)
        ratio = bounded_ratio(log_ratio)
        low, high, dual = clipped or [torch.zeros_like(log_ratio)] * 3
        metrics = {
            "update_entropy": (mean * entropies).sum(),
            "clip_fraction_low": (mean * low).sum(),
            "clip_fraction_high": (mean * high).sum(),
            "clip_fraction_dual": (mean * dual).sum(),
            "ratio_mean": (mean * ratio).sum(),
            "approx_kl": (mean * kl.k3(torch.zeros_like(log_ratio), log_ratio)).sum(),
            "ratio_max": ratio.max(),
        }
        return {
            name: value for name, value in metrics.items() if name in (*self.sums, *self.maxima)
        }


def values_of(outputs: Tensor, config: ValueLossConfig) -> Tensor:
    """Values [t] of a value head's outputs [t, n]: the one of them, or the mean of the histogram
    that they predict."""
    if config.kind == "hl_gauss":
        return value_loss.hl_gauss_value(outputs, *config.support)
    if config.squash != "none":
        squash = {"tanh": value_loss.bounded_value, "arctan": value_loss.arctan_value}[
            config.squash
        ]
        return squash(outputs[:, 0], config.low, config.high)
    return outputs[:, 0]


@dataclass(frozen=True)
class ValueLoss:
    """The distance to the value targets, a mean over the mini-batch's tokens. old_values: for a
    clipped loss."""

    config: ValueLossConfig
    targets: Tensor
    old_values: Tensor | None
    weights: Tensor

    sums: ClassVar[Sequence[str]] = ("value_loss",)
    maxima: ClassVar[Sequence[str]] = ()

    def __call__(self, outputs: Tensor, local: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, n]: values (n = 1), or logits of the bins (hl_gauss)."""
        config = self.config
        targets = local.gather(self.targets)
        weights = local.gather(self.weights)
        if config.kind == "hl_gauss":
            per_token = value_loss.hl_gauss(outputs, targets, *config.support)
        elif config.kind == "clipped":
            assert self.old_values is not None, "value_loss.kind=clipped needs the old values"
            old = local.gather(self.old_values)
            per_token = value_loss.clipped_value_loss(
                values_of(outputs, config), old, targets, config.clip
            )
        else:
            per_token = value_loss.value_mse(values_of(outputs, config), targets)
        loss = (weights * per_token).sum()
        return loss, {"value_loss": loss.detach()}


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """Supervised fine-tuning: the mean over the batch's response tokens."""

    weights: Tensor

    sums: ClassVar[Sequence[str]] = ("nll_loss", "entropy")
    maxima: ClassVar[Sequence[str]] = ()

    def __call__(self, outputs: Tensor, local: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        weights = local.gather(self.weights)
        loss = -(weights * outputs[:, 0]).sum()
        return loss, {
            "nll_loss": loss.detach(),
            "entropy": (weights * outputs[:, 1]).sum().detach(),
        }
