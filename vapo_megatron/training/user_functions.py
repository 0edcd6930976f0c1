"""A user's own advantage estimator and filter, named in the config by import path."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput, reason_of

ADVANTAGE_KEY, FILTER_KEY = "algorithm.advantage.function", "algorithm.filter_function"


@dataclass(frozen=True)
class ScoredResponses:
    """What a user's function is given: S responses with T tokens in all, end to end. CPU tensors, not to be changed.

    Attributes:
        cu_seqlens: int64 [S + 1]; response s has the tokens cu_seqlens[s] to cu_seqlens[s + 1].
        rewards: float32 [S], the verifier's after shaping; a KL penalty is not in it.
        correct: bool [S], the verifier's grade.
        truncated: bool [S], whether the response was cut off.
        group_ids: int64 [S], the same for the responses to one prompt.
        rollout_logprobs: float32 [T], the engine's.
        old_logprobs: float32 [T], the trainer's, by the same weights.
        entropies: float32 [T], in nats, of the trainer's distribution at each token.
        values: float32 [T], of the state before each token; None without a critic (advantage.estimator other than gae).
        ref_logprobs: float32 [T], the reference policy's; None without one (kl.placement=none).
    """

    cu_seqlens: Tensor
    rewards: Tensor
    correct: Tensor
    truncated: Tensor
    group_ids: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    entropies: Tensor
    values: Tensor | None
    ref_logprobs: Tensor | None


def load_function(path: str, key: str) -> Callable[[ScoredResponses], Tensor]:
    """The callable at package.module:name; modules in the working directory are found too, as a verifier's are.

    Raises:
        BadInput: it cannot be imported or is not callable; key names the field.
    """
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        raise BadInput(f"{key}={path}: cannot be imported ({reason_of(error)}): give package.module:name") from None
    if not callable(found):
        raise BadInput(f"{key}={path}: a {type(found).__name__}, expected a function of ScoredResponses")
    function: Callable[[ScoredResponses], Tensor] = found
    return function


def check_functions(config: AlgorithmConfig) -> None:
    """Raises BadInput for a function that the config names and that cannot be imported."""
    for path, key in ((config.advantage.function, ADVANTAGE_KEY), (config.filter_function, FILTER_KEY)):
        if path is not None:
            load_function(path, key)


def user_advantages(path: str, batch: ExperienceBatch) -> Tensor:
    """The user's advantages, float32 [T].

    Raises:
        BadInput: it returned something else, or numbers that are not finite.
    """
    found = load_function(path, ADVANTAGE_KEY)(scored_responses(batch))
    _check(found, (batch.response_tokens,), f"{ADVANTAGE_KEY}={path}", "a finite float tensor [T]", floating=True)
    return found.detach().float()


def user_selection(path: str, batch: ExperienceBatch) -> Tensor:
    """Responses that carry loss, bool [S].

    Raises:
        BadInput: the user's filter returned something else.
    """
    found = load_function(path, FILTER_KEY)(scored_responses(batch))
    _check(found, (batch.samples,), f"{FILTER_KEY}={path}", "a bool tensor [S]", floating=False)
    return found


def scored_responses(batch: ExperienceBatch) -> ScoredResponses:
    """The part of a scored batch that users see."""
    assert batch.shaped_rewards is not None, "no shaped rewards: estimate_advantages comes first"
    assert batch.old_logprobs is not None and batch.entropies is not None, "the policy has not scored the batch"
    return ScoredResponses(
        cu_seqlens=batch.response_cu_seqlens,
        rewards=batch.shaped_rewards,
        correct=batch.correct,
        truncated=batch.truncated,
        group_ids=batch.group_ids,
        rollout_logprobs=batch.rollout_logprobs,
        old_logprobs=batch.old_logprobs,
        entropies=batch.entropies,
        values=batch.values,
        ref_logprobs=batch.ref_logprobs,
    )


def _check(found: object, shape: tuple[int, ...], who: str, expected: str, floating: bool) -> None:
    if isinstance(found, Tensor) and tuple(found.shape) == shape:
        if floating and found.is_floating_point() and bool(found.isfinite().all()):
            return
        if not floating and found.dtype == torch.bool:
            return
    what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise BadInput(f"{who}: it returned {what}, expected {expected} = {list(shape)}")
