"""The losses of one optimizer step as Megatron's schedule expects them: sums over local positions, already weighted.

Each holds tensors over the whole batch's response tokens [T]; what lies outside the mini-batch has weight 0. The
formulas are those of vapo_megatron.algorithms; here they only meet the layout, through LocalTokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, assert_never

import torch
from torch import Tensor

from vapo_megatron.algorithms import kl, policy_loss, value_loss
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.megatron.token_loss import LocalTokens
from vapo_megatron.training.user_functions import PolicyTerms, user_policy_loss


@dataclass(frozen=True)
class PolicyLoss:
    """L = L_policy + mu L_NLL + beta KL - c H (VAPO, sections 4.2 and 4.3; GRPO, eq. 3).

    weights and nll_weights hold the aggregation and its global denominators; mean_weights is 1 / N on the N tokens of
    the mini-batch, for the metrics. old_logprobs are those of the policy that optimisation starts from; None where this
    very forward pass computes them: every ratio is then 1 and its gradient that of the log-prob. importance corrects
    the policy loss alone for the engine's policy. values are the critic's; None without one.
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
        """Metrics that are added up; those of a part of the loss only where it is on."""
        always = ("policy_loss", "nll_loss", "update_entropy", "clip_fraction_low", "clip_fraction_high")
        return (
            *(*always, "ratio_mean", "approx_kl"),
            *(("clip_fraction_dual",) if self.config.dual_clip is not None else ()),
            *(("kl_loss",) if self.kl.placement == "loss" else ()),
        )

    def __call__(self, outputs: Tensor, local: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, 2]: log-probs and entropies."""
        config, gather = self.config, local.gather
        logprobs, entropies = outputs.unbind(-1)
        weights = gather(self.weights)
        parts = {
            "policy_loss": (weights * gather(self.importance) * self._surrogate(logprobs, entropies, local)).sum(),
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
        return loss, metrics | self._figures(logprobs.detach(), entropies.detach(), local)

    def _surrogate(self, logprobs: Tensor, entropies: Tensor, local: LocalTokens) -> Tensor:
        config, old, advantages = self.config, self._old(logprobs, local), local.gather(self.advantages)
        if config.kind == "function":
            terms = PolicyTerms(
                logprobs=logprobs,
                entropies=entropies,
                old_logprobs=old,
                rollout_logprobs=local.gather(self.rollout_logprobs),
                ref_logprobs=local.gather(self.ref_logprobs) if self.kl.placement != "none" else None,
                advantages=advantages,
                values=None if self.values is None else local.gather(self.values),
                mask=local.gather(self.weights) > 0,
            )
            assert config.function is not None, "the config refuses it"
            return user_policy_loss(config.function, terms)
        if config.kind == "reinforce":
            return policy_loss.reinforce(logprobs, advantages)
        if config.kind == "cispo":
            return policy_loss.cispo(logprobs, old, advantages, config.clip_high)
        if config.kind == "sao" or config.kind == "dppo":
            clipped = policy_loss.sao if config.kind == "sao" else policy_loss.dppo
            rollout = local.gather(self.rollout_logprobs)
            return clipped(logprobs, rollout, advantages, config.clip_low, config.clip_high)
        if config.kind == "gspo":
            sequence = local.sequence_mean(logprobs - old)
            return policy_loss.gspo(logprobs, sequence, advantages, config.clip_low, config.clip_high)
        if config.kind == "ppo_clip":
            return policy_loss.ppo_clip(logprobs, old, advantages, config.clip_low, config.clip_high, config.dual_clip)
        assert_never(config.kind)

    def _old(self, logprobs: Tensor, local: LocalTokens) -> Tensor:
        return logprobs.detach() if self.old_logprobs is None else local.gather(self.old_logprobs)

    @torch.no_grad()
    def _figures(self, logprobs: Tensor, entropies: Tensor, local: LocalTokens) -> dict[str, Tensor]:
        mean, old = local.gather(self.mean_weights), self._old(logprobs, local)
        log_ratio = torch.where(mean > 0, logprobs - old, 0)
        ratio = policy_loss.bounded_ratio(log_ratio)
        low, high, dual = self._bounded(log_ratio, logprobs, local)
        metrics = {
            "update_entropy": (mean * entropies).sum(),
            "clip_fraction_low": (mean * low).sum(),
            "clip_fraction_high": (mean * high).sum(),
            "clip_fraction_dual": (mean * dual).sum(),
            "ratio_mean": (mean * ratio).sum(),
            "approx_kl": (mean * kl.k3(torch.zeros_like(log_ratio), log_ratio)).sum(),
            "ratio_max": ratio.max(),
        }
        return {name: value for name, value in metrics.items() if name in (*self.sums, *self.maxima)}

    def _bounded(self, log_ratio: Tensor, logprobs: Tensor, local: LocalTokens) -> tuple[Tensor, Tensor, Tensor]:
        """1 on the tokens that a low, high or dual bound of this kind of loss acts on, else 0."""
        config, none = self.config, torch.zeros_like(log_ratio)
        if config.kind == "reinforce" or config.kind == "function":
            return none, none, none
        if config.kind == "cispo":
            return policy_loss.cispo_clip_indicators(log_ratio, config.clip_high)
        if config.kind == "sao":
            to_rollout = logprobs - local.gather(self.rollout_logprobs)
            return policy_loss.sao_clip_indicators(to_rollout, config.clip_low, config.clip_high)
        if config.kind == "dppo":
            rollout, advantages = local.gather(self.rollout_logprobs), local.gather(self.advantages)
            return policy_loss.dppo_clip_indicators(logprobs, rollout, advantages, config.clip_low, config.clip_high)
        if config.kind == "gspo" or config.kind == "ppo_clip":
            apart = local.sequence_mean(log_ratio) if config.kind == "gspo" else log_ratio
            advantages = local.gather(self.advantages)
            return policy_loss.clip_indicators(apart, advantages, config.clip_low, config.clip_high, config.dual_clip)
        assert_never(config.kind)


def values_of(outputs: Tensor, config: ValueLossConfig) -> Tensor:
    """Values [t] of a value head's outputs [t, n]: the one of them, or the mean of the histogram that they predict."""
    if config.kind == "hl_gauss":
        return value_loss.hl_gauss_value(outputs, *config.support)
    if config.squash != "none":
        squash = {"tanh": value_loss.bounded_value, "arctan": value_loss.arctan_value}[config.squash]
        return squash(outputs[:, 0], config.low, config.high)
    return outputs[:, 0]


@dataclass(frozen=True)
class ValueLoss:
    """The distance to the value targets, a mean over the mini-batch's tokens. old_values: for a clipped loss."""

    config: ValueLossConfig
    targets: Tensor
    old_values: Tensor | None
    weights: Tensor

    sums: ClassVar[Sequence[str]] = ("value_loss",)
    maxima: ClassVar[Sequence[str]] = ()

    def __call__(self, outputs: Tensor, local: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """outputs [t, n]: values (n = 1), or logits of the bins (hl_gauss)."""
        config, targets, weights = self.config, local.gather(self.targets), local.gather(self.weights)
        if config.kind == "hl_gauss":
            per_token = value_loss.hl_gauss(outputs, targets, *config.support)
        elif config.kind == "clipped":
            assert self.old_values is not None, "value_loss.kind=clipped needs the old values"
            old = local.gather(self.old_values)
            per_token = value_loss.clipped_value_loss(values_of(outputs, config), old, targets, config.clip)
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
        return loss, {"nll_loss": loss.detach(), "entropy": (weights * outputs[:, 1]).sum().detach()}
