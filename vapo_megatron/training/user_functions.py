"""A user's own advantages, policy loss, masks, filter and metrics, named in the config by import
path."""

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A user's module may import PolicyTerms from here, beside ScoredResponses.
from vapo_megatron.algorithms.policy_loss import PolicyTerms as PolicyTerms
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.sample import Sample
from vapo_megatron.errors import BadInput, reason_of

ADVANTAGE_KEY = "algorithm.advantage.function"
FILTER_KEY = "algorithm.filter_function"
LOSS_KEY = "algorithm.policy_loss.function"
METRICS_KEY = "algorithm.metrics_function"
MASK_KEY = "algorithm.mask_function"
NOTHING_LEFT = "it leaves no token of a response"


@dataclass(frozen=True)
class ScoredResponses:
    """The argument of a user's function: S responses with T tokens in all, end to end, as read-only
    CPU tensors.

    The tokens are those that the policy wrote; observations between them (Sample.loss_mask) are
    left out.

    Attributes:
        cu_seqlens: int64 [S + 1]; response s has the tokens cu_seqlens[s] to cu_seqlens[s + 1].
        tokens: int32 [T].
        rewards: float32 [S], the verifier's after shaping; a KL penalty is not in it.
        correct: bool [S], the verifier's grade.
        truncated: bool [S], whether the response was cut off.
        group_ids: int64 [S], the same for the responses to one prompt.
        rollout_logprobs: float32 [T], the engine's.
        old_logprobs: float32 [T], the trainer's, by the same weights.
        entropies: float32 [T], in nats, of the trainer's distribution at each token.
        values: float32 [T], of the state before each token; None without a critic
            (advantage.estimator other than gae).
        ref_logprobs: float32 [T], the reference policy's; None without one (kl.placement=none).
        advantages, returns: float32 [T]; returns are the value targets. For a function of metrics;
            to one of advantages they are what the configured estimator gives, None where there is
            none.
    """

    cu_seqlens: Tensor
    tokens: Tensor
    rewards: Tensor
    correct: Tensor
    truncated: Tensor
    group_ids: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    entropies: Tensor
    values: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor | None = None
    returns: Tensor | None = None


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The callable at package.module:name; modules in the working directory are found too, as a
    verifier's are.

    Raises:
        BadInput: it cannot be imported or is not callable; key names the field.
    """
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        loaded: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        raise BadInput(
            f"{key}={path}: cannot be imported ({reason_of(error)}): give package.module:name, of "
            "a module in the working directory or on PYTHONPATH"
        ) from None
    if not callable(loaded):
        raise BadInput(f"{key}={path}: a {type(loaded).__name__}, expected a function")
    function: Callable[..., Any] = loaded
    return function


def check_functions(config: AlgorithmConfig) -> None:
    """Raises BadInput for a function that the config names and that cannot be imported."""
    for path, key in (
        (config.advantage.function, ADVANTAGE_KEY),
        (config.policy_loss.function, LOSS_KEY),
        (config.filter_function, FILTER_KEY),
        (config.mask_function, MASK_KEY),
        (config.metrics_function, METRICS_KEY),
    ):
        if path is not None:
            load_function(path, key)


def mask_tokens(
    path: str, samples: Sequence[Sample], decode: Callable[[Sequence[int]], str]
) -> None:
    """Make observations of the tokens that the user's function takes out of the loss of graded
    samples, in place.

    Raises:
        BadInput: it returned something else, or left no token that the policy wrote.
    """
    who = f"{MASK_KEY}={path}"
    # A broken episode has none
    for sample in (sample for sample in samples if len(sample.response_ids)):
        kept = load_function(path, MASK_KEY)(sample, decode)
        _check(kept, sample.response_ids.shape, who, "a bool tensor [response]", floating=False)
        mask = kept.numpy() & sample.written
        if not mask.any():
            raise BadInput(f"{who}: {NOTHING_LEFT}, expected one at least: use {FILTER_KEY}")
        sample.loss_mask = None if mask.all() else mask


def user_advantages(path: str, has_critic: bool, batch: ExperienceBatch) -> Tensor:
    """The user's advantages and value targets, float32 [T, 2]; targets that were not given are NaN.

    Raises:
        BadInput: it returned something else, numbers that are not finite, or targets for which
            there is no critic.
    """
    who = f"{ADVANTAGE_KEY}={path}"
    shape = (batch.response_tokens,)
    answer = load_function(path, ADVANTAGE_KEY)(scored_responses(batch))
    with_targets = isinstance(answer, tuple) and len(answer) == 2
    if with_targets and not has_critic:
        raise BadInput(
            f"{who}: it returned value targets, and no critic learns them: set "
            "advantage.estimator=gae"
        )
    columns = answer if with_targets else (answer,)
    for column in columns:
        _check(column, shape, who, "a finite float tensor [T]", floating=True)
    missing = torch.full(shape, torch.nan)
    return torch.stack([*(column.detach().float() for column in columns), missing][:2], dim=1)


def user_policy_loss(path: str, terms: PolicyTerms) -> Tensor:
    """The user's loss of each token [t], 0 where none is carried.

    Raises:
        BadInput: it returned something else, numbers that are not finite, or nothing that has a
            gradient.
    """
    who = f"{LOSS_KEY}={path}"
    mask = terms.mask
    # What comes back for other tokens is left out, but its gradient may be 0 times infinity.
    logprobs, entropies = (
        torch.where(mask, x, x.detach()) for x in (terms.logprobs, terms.entropies)
    )
    own = replace(terms, logprobs=logprobs, entropies=entropies)
    answer = load_function(path, LOSS_KEY)(own)
    if isinstance(answer, Tensor) and answer.shape == terms.mask.shape:
        answer = torch.where(mask, answer, 0)
    _check(answer, tuple(terms.mask.shape), who, "a finite float tensor [t]", floating=True)
    if terms.logprobs.requires_grad and not answer.requires_grad:
        raise BadInput(
            f"{who}: its return value has no gradient, expected a function of terms.logprobs"
        )
    loss: Tensor = answer
    return loss


def user_metrics(path: str, batch: ExperienceBatch) -> dict[str, float]:
    """The user's metrics of a step, under their names in the step's row.

    Raises:
        BadInput: it returned something else than finite numbers by name.
    """
    answer = load_function(path, METRICS_KEY)(scored_responses(batch))
    numbers = (int, float, Tensor)
    if not isinstance(answer, Mapping) or not all(
        isinstance(value, numbers) for value in answer.values()
    ):
        raise BadInput(
            f"{METRICS_KEY}={path}: it returned {answer!r:.200}, expected numbers by name"
        )
    row = {f"custom/{name}": float(value) for name, value in answer.items()}
    for name, value in row.items():
        if not math.isfinite(value):
            raise BadInput(
                f"{METRICS_KEY}={path}: {name} is {value}, expected a finite number; leave it out "
                "instead"
            )
    return row


def user_selection(path: str, batch: ExperienceBatch) -> Tensor:
    """Responses that carry loss, bool [S].

    Raises:
        BadInput: the user's filter returned something else.
    """
    selected = load_function(path, FILTER_KEY)(scored_responses(batch))
    _check(selected, (batch.samples,), f"{FILTER_KEY}={path}", "a bool tensor [S]", floating=False)
    return selected


def scored_responses(batch: ExperienceBatch) -> ScoredResponses:
    """The part of a scored batch that users see."""
    assert batch.shaped_rewards is not None, "no shaped rewards: estimate_advantages comes first"
    assert batch.old_logprobs is not None and batch.entropies is not None, (
        "the policy has not scored the batch"
    )
    places = [
        batch.cu_seqlens[sample] + batch.response_places(sample) for sample in range(batch.samples)
    ]
    chosen: dict[str, Any] = {
        "cu_seqlens": batch.response_cu_seqlens,
        "tokens": batch.tokens[torch.cat(places)],
        "rewards": batch.shaped_rewards,
    }
    same: dict[str, Any] = {
        f.name: getattr(batch, f.name) for f in fields(ScoredResponses) if f.name not in chosen
    }
    return ScoredResponses(**chosen, **same)


def _check(found: object, shape: tuple[int, ...], who: str, expected: str, floating: bool) -> None:
    if isinstance(found, Tensor) and tuple(found.shape) == shape:
        if floating and found.is_floating_point() and bool(found.float().isfinite().all()):
            return
        if not floating and found.dtype == torch.bool:
            return
    if isinstance(found, Tensor):
        description = f"{found.dtype} {list(found.shape)}"
    else:
        description = type(found).__name__
    raise BadInput(f"{who}: it returned {description}, expected {expected} = {list(shape)}")
