"""Estimators of KL(pi || pi_ref) from one sampled token (Schulman, "Approximating KL divergence",
2020).

logprobs and ref_logprobs are [T], natural logarithms of the sampled tokens; the results are [T]. As
losses k2 and k3 are differentiated through logprobs; k1 has expected gradient 0 there and belongs
in the reward.
"""

from torch import Tensor

from vapo_megatron.algorithms.policy_loss import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log pi_ref: unbiased, of either sign."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2: biased, but its expected gradient is the KL
    divergence's."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log pi_ref - log pi: unbiased and never negative."""
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.expm1() - d
