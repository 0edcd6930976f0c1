"""Policy losses per token, un-reduced and to be minimised; `aggregation` has the weights that sum
them up.

All arguments are [T] unless said otherwise; log-probs are natural logarithms. Only the first
argument of each carries a gradient. A function with the decorator `policy_loss` is what the trainer
calls: it returns the losses of a formula together with the tokens that the formula clips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vapo_megatron.algorithms.registry import policy_loss


@dataclass(frozen=True)
class PolicyTerms:
    """The argument of a policy loss: t tokens of a micro-batch on this rank's device, in no
    particular order.

    A response may be cut over ranks and micro-batches: the loss of a token may depend on that
    token's numbers alone.

    Attributes:
        logprobs: float32 [t], of the policy that is trained, at the sampling temperature; carries
            the gradient.
        entropies: float32 [t], in nats, of that policy; carries the gradient.
        old_logprobs: float32 [t], of the policy before the step's first update.
        rollout_logprobs: float32 [t], the engine's.
        ref_logprobs: float32 [t], the reference policy's; None without one (kl.placement=none).
        advantages: float32 [t].
        values: float32 [t], the critic's before the step; None without a critic.
        mask: bool [t], the tokens that carry loss; what the function returns for others is not
            read.
        sequence_log_ratio: float32 [t], the mean of logprobs - old_logprobs over the token's
            response, without a gradient; None unless the loss is registered with per_sequence.
    """

    logprobs: Tensor
    entropies: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    values: Tensor | None
    mask: Tensor
    sequence_log_ratio: Tensor | None = None


@dataclass(frozen=True)
class Clip:
    """Bounds of a policy loss (config section policy_loss). dual: None without a dual clip."""

    low: float
    high: float
    dual: float | None = None


# float32 [T] each: 1 on the tokens whose gradient the low, high or dual bound cuts off, else 0.
ClipIndicators = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss returns: the loss of each token [t], and which bound clips it; clipped
    None: no bound does."""

    losses: Tensor
    clipped: ClipIndicators | None = None


# exp(20) = 4.9e8: a larger ratio is a numerical accident, and must not become inf * 0.
MAX_LOG_RATIO = 20.0


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), always finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    advantages = advantages.detach()
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    if dual_clip is not None:
        surrogate = torch.where(
            advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate
        )
    return -surrogate


@torch.no_grad()
def clip_indicators(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClipIndicators:
    """Tokens where the clipped surrogate is flat: A < 0 and r below 1 - clip_low, A > 0 and r above
    1 + clip_high, A < 0 and r above dual_clip."""
    ratio = bounded_ratio(log_ratio)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    if dual_clip is None:
        dual = torch.zeros_like(low)
    else:
        dual = (advantages < 0) & (ratio > dual_clip)
    return low.float(), high.float(), dual.float()


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347, eq. 7), with a separate upper bound as in DAPO (arXiv 2503.14476, eq. 10)
    and VAPO. dual_clip c > 1 + clip_high bounds the loss of tokens with A < 0 by -c A (Ye et al.,
    arXiv 1912.09729, eq. 5).
    """
    ratio = bounded_ratio(logprobs - old_logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


@policy_loss("ppo_clip", dual_clip=True)
def _ppo_clip(terms: PolicyTerms, clip: Clip) -> TokenLosses:
    logprobs = terms.logprobs
    old = terms.old_logprobs
    advantages = terms.advantages
    return TokenLosses(
        ppo_clip(logprobs, old, advantages, clip.low, clip.high, clip.dual),
        clip_indicators(logprobs - old, advantages, clip.low, clip.high, clip.dual),
    )


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi. Summed over a response it is the loss of RLOO and ReMax."""
    return -logprobs * advantages.detach()


@policy_loss("reinforce")
def _reinforce(terms: PolicyTerms, _: Clip) -> TokenLosses:
    return TokenLosses(reinforce(terms.logprobs, terms.advantages))


def gspo(
    logprobs: Tensor,
    sequence_log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Clipped surrogate of the sequence ratio (GSPO-token, arXiv 2507.18071, eq. 13 and 14).

    sequence_log_ratio is the mean of log r over the response, given to each of its tokens. The
    ratio of a token is sg(s) pi / sg(pi), with the value of the sequence's ratio and the token's
    gradient. With one advantage per response and the weights of "sequence_mean", value and gradient
    equal GSPO's.
    """
    ratio = bounded_ratio(sequence_log_ratio.detach()) * (logprobs - logprobs.detach()).exp()
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, None)


@policy_loss("gspo", per_sequence=True)
def _gspo(terms: PolicyTerms, clip: Clip) -> TokenLosses:
    log_ratio = terms.sequence_log_ratio
    advantages = terms.advantages
    assert log_ratio is not None, "it is registered with per_sequence"
    return TokenLosses(
        gspo(terms.logprobs, log_ratio, advantages, clip.low, clip.high),
        clip_indicators(log_ratio, advantages, clip.low, clip.high),
    )


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """-sg(min(r, 1 + clip_high)) A log pi (CISPO, arXiv 2506.13585, eq. 4 and 5, which leaves the
    low side open)."""
    ratio = bounded_ratio((logprobs - old_logprobs).detach())
    return -ratio.clamp(max=1 + clip_high) * advantages.detach() * logprobs


@torch.no_grad()
def cispo_clip_indicators(log_ratio: Tensor, clip_high: float) -> ClipIndicators:
    """Tokens where cispo's weight is clipped: r above 1 + clip_high."""
    none = torch.zeros_like(log_ratio)
    return none, (bounded_ratio(log_ratio) > 1 + clip_high).float(), none


@policy_loss("cispo")
def _cispo(terms: PolicyTerms, clip: Clip) -> TokenLosses:
    logprobs = terms.logprobs
    old = terms.old_logprobs
    return TokenLosses(
        cispo(logprobs, old, terms.advantages, clip.high),
        cispo_clip_indicators(logprobs - old, clip.high),
    )


def sao(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-r A where 1 - clip_low < r < 1 + clip_high, else 0; r is taken to the rollout policy (SAO,
    2607.07508)."""
    ratio = bounded_ratio(logprobs - rollout_logprobs.detach())
    inside = (ratio.detach() > 1 - clip_low) & (ratio.detach() < 1 + clip_high)
    return torch.where(inside, -ratio * advantages.detach(), 0)


@torch.no_grad()
def sao_clip_indicators(log_ratio: Tensor, clip_low: float, clip_high: float) -> ClipIndicators:
    """Tokens where sao's loss is 0; log_ratio is to the rollout policy."""
    ratio = bounded_ratio(log_ratio)
    none = torch.zeros_like(log_ratio)
    return (ratio <= 1 - clip_low).float(), (ratio >= 1 + clip_high).float(), none


@policy_loss("sao", rollout_ratio=True)
def _sao(terms: PolicyTerms, clip: Clip) -> TokenLosses:
    logprobs = terms.logprobs
    rollout = terms.rollout_logprobs
    return TokenLosses(
        sao(logprobs, rollout, terms.advantages, clip.low, clip.high),
        sao_clip_indicators(logprobs - rollout, clip.low, clip.high),
    )


# Largest importance weight, as in verl's dppo_tv.
DPPO_LARGEST_RATIO = 20.0


def dppo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-sg(min(r, 20)) A log pi, but 0 where A > 0 and pi - mu > clip_high, or A <= 0 and mu - pi >
    clip_low.

    r = pi / mu, mu the policy that drew the token: DPPO with the total variation of the drawn token
    (arXiv 2602.04879).
    """
    low, high, _ = dppo_clip_indicators(logprobs, rollout_logprobs, advantages, clip_low, clip_high)
    ratio = bounded_ratio((logprobs - rollout_logprobs).detach()).clamp(max=DPPO_LARGEST_RATIO)
    return torch.where((low + high) > 0, 0, -ratio * advantages.detach() * logprobs)


@torch.no_grad()
def dppo_clip_indicators(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> ClipIndicators:
    """Tokens where dppo's loss is 0."""
    moved = logprobs.exp() - rollout_logprobs.exp()
    low = (advantages <= 0) & (moved < -clip_low)
    high = (advantages > 0) & (moved > clip_high)
    return low.float(), high.float(), torch.zeros_like(moved)


@policy_loss("dppo", rollout_ratio=True)
def _dppo(terms: PolicyTerms, clip: Clip) -> TokenLosses:
    logprobs = terms.logprobs
    rollout = terms.rollout_logprobs
    advantages = terms.advantages
    return TokenLosses(
        dppo(logprobs, rollout, advantages, clip.low, clip.high),
        dppo_clip_indicators(logprobs, rollout, advantages, clip.low, clip.high),
    )
