"""Draws responses, continues them at some of their states, and grades what follows."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
from vapo_megatron.data.batch import ExperienceBatch, from_samples
from vapo_megatron.data.prompts import eval_prompts
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.request import GenerationRequest
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.command import WEIGHT_VERSION
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.training.advantages import shaped_rewards

Phase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Drawn:
    """P states with k continuations each, C = P k, those of a state together.

    Attributes:
        batch: continuations as responses to prompt and prefix, their rewards shaped; group_ids is the state's number.
        lengths: int64 [C], response tokens in all, prefix and continuation.
        siblings: float64 [P], the mean reward of the other responses to the prompt.
        prompts, positions, places: int64 [P], as in algorithms.critic_probes.Probes.
        responses: rewards of the responses that the states were taken from, [R].
    """

    batch: ExperienceBatch
    lengths: Tensor
    siblings: Tensor
    prompts: Tensor
    positions: Tensor
    places: Tensor
    responses: Tensor


def choose_prompts(config: ProbedRunConfig, tokenizer: TextTokenizer) -> tuple[str, list[Prompt]]:
    """A description of the prompts, and the prompts themselves, their cursors from 0.

    Raises:
        BadInput: critic_probes.set is no set of data.eval, or its file cannot be used.
    """
    probes, sets = config.critic_probes, {entry.name: entry for entry in config.data.eval}
    if not sets or (probes.set is not None and probes.set not in sets):
        raise BadInput(f"critic_probes.set={probes.set}: data.eval has {', '.join(sets) or 'no set'}: name one of them")
    entry = sets[probes.set or config.data.eval[0].name]
    prompts = eval_prompts(entry, config.data, tokenizer, config.critic.privileged_field)
    chosen = random.Random(probes.seed).sample(prompts, min(probes.prompts, len(prompts)))
    if len(chosen) < 2:
        raise BadInput(f"critic_probes.set={entry.name}: has {len(chosen)} prompt, expected two at least")
    return f"set {entry.name} of data.eval", [replace(prompt, cursor=place) for place, prompt in enumerate(chosen)]


def draw(
    config: ProbedRunConfig,
    prompts: Sequence[Prompt],
    engines: Dispatcher,
    tokenizer: TextTokenizer,
    verifier: VerifierPool,
    phase: Phase,
) -> Drawn:
    """Responses to prompts, states of them, and their continuations at the sampling settings of training."""
    probes, k = config.critic_probes, config.critic_probes.continuations
    total = len(prompts) * probes.responses_per_prompt
    with phase("responses", total) as advance:
        request = GenerationRequest(prompts, probes.responses_per_prompt, config.sampling, probes.seed, WEIGHT_VERSION)
        responses = engines.collect(request, advance)
    with phase("grades", total) as advance:
        grade_samples(responses, verifier, tokenizer.decode, config.reward, advance)
    graded = from_samples(responses)
    rewards = shaped_rewards(graded, config.algorithm.shaping)
    owners, cuts, places = cut(responses, probes)
    starts = [
        _prefix(responses[owner], at, len(prompts) + n) for n, (owner, at) in enumerate(zip(owners, cuts, strict=True))
    ]
    limits = [config.sampling.max_new_tokens - at for at in cuts]
    with phase("continuations", len(starts) * k) as advance:
        request = GenerationRequest(starts, k, config.sampling, probes.seed, WEIGHT_VERSION, max_new_tokens=limits)
        tails = engines.collect(request, advance)
    whole = [_joined(responses[owners[tail.group]], cuts[tail.group], tail) for tail in tails]
    with phase("grades of continuations", len(whole)) as advance:
        grade_samples(whole, verifier, tokenizer.decode, config.reward, advance)
    shaped = from_samples(whole)
    for tail, sample, reward in zip(
        tails, whole, shaped_rewards(shaped, config.algorithm.shaping).tolist(), strict=True
    ):
        tail.reward, tail.correct = reward, sample.correct
    batch, owner = from_samples(tails), torch.tensor(owners)
    return Drawn(
        batch,
        shaped.response_lengths,
        leave_one_out(rewards, graded.group_ids)[owner],
        graded.group_ids[owner],
        torch.tensor(cuts),
        torch.tensor(places),
        rewards,
    )


def cut(responses: Sequence[Sample], probes: CriticProbesConfig) -> tuple[list[int], list[int], list[int]]:
    """States of each response, one for each quantile: its response, the tokens before it, the quantile, by number."""
    each = [
        (number, int(quantile * len(response.response_ids)), place)
        for number, response in enumerate(responses)
        for place, quantile in enumerate(probes.quantiles)
    ]
    owners, cuts, places = (list(column) for column in zip(*each, strict=True))
    return owners, cuts, places


def _prefix(response: Sample, at: int, cursor: int) -> Prompt:
    """The prompt and the first tokens of a response, as a prompt."""
    ids = (*response.prompt.token_ids, *response.response_ids[:at].tolist())
    return replace(response.prompt, token_ids=ids, cursor=cursor)


def _joined(response: Sample, at: int, tail: Sample) -> Sample:
    """The whole response that a continuation makes."""
    return replace(
        tail,
        prompt=response.prompt,
        response_ids=np.concatenate((response.response_ids[:at], tail.response_ids)),
        rollout_logprobs=np.concatenate((response.rollout_logprobs[:at], tail.rollout_logprobs)),
    )
