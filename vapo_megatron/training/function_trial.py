"""Calls a user's functions once before a run, with made-up responses to its first prompts: what
they return is otherwise seen only after the first rollout, or after value pretraining."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.algorithms.policy_loss import PolicyTerms
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.training import user_functions
from vapo_megatron.training.user_functions import (
    mask_tokens,
    user_advantages,
    user_metrics,
    user_policy_loss,
    user_selection,
)

_PROMPTS = 3
_LONGEST = 12  # tokens of a made-up response
_SEED = 1


def try_functions(
    config: AlgorithmConfig,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    decode: Callable[[Sequence[int]], str],
    vocab_size: int,
) -> list[str]:
    """A caution for each function that raised an exception, which made-up responses may cause
    alone.

    Args:
        config: names the functions; they can be imported (check_functions).
        prompts: of the run, tokenized.
        samples_per_prompt: of the run.
        decode: as in Tokenizer.
        vocab_size: of the model.

    Raises:
        BadInput: a function returned something else than it must.
    """
    named = (
        config.advantage.function,
        config.filter_function,
        config.metrics_function,
        config.policy_loss.function,
        config.mask_function,
    )
    if not any(named):
        return []
    samples = _samples(prompts[:_PROMPTS], samples_per_prompt, decode, vocab_size)
    batch = _scored(from_samples(deepcopy(samples)), config)
    has_critic = config.advantage.estimator == "gae"
    trials: list[tuple[str, str | None, Callable[[str], object]]] = [
        (
            user_functions.ADVANTAGE_KEY,
            config.advantage.function,
            partial(user_advantages, has_critic=has_critic, batch=batch),
        ),
        (
            user_functions.FILTER_KEY,
            config.filter_function,
            partial(user_selection, batch=batch),
        ),
        (
            user_functions.METRICS_KEY,
            config.metrics_function,
            partial(user_metrics, batch=batch),
        ),
        (
            user_functions.LOSS_KEY,
            config.policy_loss.function,
            partial(user_policy_loss, terms=_terms(batch)),
        ),
        (
            user_functions.MASK_KEY,
            config.mask_function,
            partial(_mask, samples=samples, decode=decode),
        ),
    ]
    cautions = []
    for key, path, call in trials:
        if path is None:
            continue
        try:
            call(path)
        except BadInput:
            raise
        except Exception as error:  # a user's function may raise anything
            cautions.append(
                f"{key}={path} raised {reason_of(error)} when it was tried on made-up responses: "
                "on real ones that ends the run"
            )
    return cautions


def _mask(path: str, samples: Sequence[Sample], decode: Callable[[Sequence[int]], str]) -> None:
    try:
        mask_tokens(path, samples, decode)
    except BadInput as error:
        if user_functions.NOTHING_LEFT not in str(error):
            raise  # of made-up text nothing may be left


def _samples(
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    decode: Callable[[Sequence[int]], str],
    vocab_size: int,
) -> list[Sample]:
    """Responses of random tokens of the prompts, half of them correct, some cut off."""
    random = np.random.default_rng(_SEED)
    known = sorted({token for prompt in prompts for token in prompt.token_ids}) or [vocab_size - 1]
    samples = []
    for group, prompt in enumerate(prompts):
        for index in range(samples_per_prompt):
            length = int(random.integers(1, _LONGEST + 1))
            ids = random.choice(known, length)
            correct = bool(random.random() < 0.5)
            samples.append(
                Sample(
                    prompt,
                    group,
                    index,
                    _SEED,
                    ids.astype(np.int32),
                    -random.exponential(size=length).astype(np.float32),
                    "length" if length == _LONGEST else "stop",
                    0,
                    0,
                    text=decode(ids.tolist()),
                    reward=1.0 if correct else -1.0,
                    correct=correct,
                )
            )
    return samples


def _scored(batch: ExperienceBatch, config: AlgorithmConfig) -> ExperienceBatch:
    """With all that models and estimator would add."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = batch.response_tokens

    def by_token() -> Tensor:
        return torch.randn(tokens, generator=generator)

    batch.shaped_rewards = batch.rewards
    batch.old_logprobs = batch.rollout_logprobs + 0.01 * by_token()
    batch.entropies = by_token().abs()
    if config.uses_reference:
        batch.ref_logprobs = batch.old_logprobs + 0.01 * by_token()
    if config.advantage.estimator == "gae":
        batch.values = by_token()
        batch.returns = by_token()
    batch.advantages = by_token()
    return batch


def _terms(batch: ExperienceBatch) -> PolicyTerms:
    """The same tokens as a policy loss gets them."""
    assert batch.old_logprobs is not None and batch.entropies is not None
    assert batch.advantages is not None
    return PolicyTerms(
        logprobs=batch.old_logprobs.clone().requires_grad_(),
        entropies=batch.entropies.clone().requires_grad_(),
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=batch.ref_logprobs,
        advantages=batch.advantages,
        values=batch.values,
        mask=torch.ones(batch.response_tokens, dtype=torch.bool),
    )
