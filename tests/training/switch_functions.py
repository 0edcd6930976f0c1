"""A user's advantage estimator, policy loss, filter and mask, as tests of the switches name them in
a config."""

from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.sample import Sample
from vapo_megatron.training.user_functions import PolicyTerms, ScoredResponses


def tilt(scored: ScoredResponses) -> Tensor:
    """(R + g / 2)(1 + |log pi|) for the tokens of a response of group g: float32 [T]."""
    of_response = scored.rewards + 0.5 * scored.group_ids
    return of_response.repeat_interleave(scored.cu_seqlens.diff()) * (1 + scored.old_logprobs.abs())


def nudge(terms: PolicyTerms) -> Tensor:
    """-A log pi + (log pi - log pi_old)^2 / 10: float32 [t]."""
    return -terms.advantages * terms.logprobs + (terms.logprobs - terms.old_logprobs) ** 2 / 10


def keep(scored: ScoredResponses) -> Tensor:
    """Responses of an odd number of tokens: bool [S]."""
    found: torch.Tensor = scored.cu_seqlens.diff() % 2 == 1
    return found


def every_second(sample: Sample, decode: Any) -> Tensor:
    """Tokens 0, 2, 4 and so on of a response that is graded already: bool [response]."""
    assert sample.reward is not None
    return torch.arange(len(sample.response_ids)) % 2 == 0


def surprise(scored: ScoredResponses) -> dict[str, float]:
    """The mean surprise, which needs the policy's log-probs before the update."""
    return {"surprise": float(scored.old_logprobs.abs().mean())}
