"""Draws responses or episodes, continues them at some of their states, and grades what follows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.agents.episodes import Agents, is_whole
from vapo_megatron.agents.processes import AgentProcesses
from vapo_megatron.agents.recording import recorded_turns
from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.prompts import eval_prompts, train_prompts
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.evaluation.command import WEIGHT_VERSION
from vapo_megatron.evaluation.evaluator import Phase
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.training.token_rewards import shaped_rewards

FOLDER = "critic_probes"


@dataclass(frozen=True)
class Drawn:
    """P states with k continuations each, C = P k, ordered by state.

    Attributes:
        batch: whole responses, a prefix and a continuation each, their rewards shaped; group_ids is
            the state's number.
        starts: int64 [C], place of the state among the response tokens of `batch`.
        siblings: float64 [P], the mean reward of the other responses to the prompt.
        prompts, positions, places: int64 [P], as in algorithms.critic_probes.Probes; positions of
            episodes are turns.
        responses: rewards of the responses that the states were taken from, [R].
    """

    batch: ExperienceBatch
    starts: Tensor
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
    probes = config.critic_probes
    sets = {entry.name: entry for entry in config.data.eval}
    if not sets or (probes.set is not None and probes.set not in sets):
        raise BadInput(
            f"critic_probes.set={probes.set}: data.eval has {', '.join(sets) or 'no set'}: name "
            "one of them"
        )
    entry = sets[probes.set or config.data.eval[0].name]
    prompts = eval_prompts(entry, config.data, tokenizer, config.critic.privileged_field)
    chosen = random.Random(probes.seed).sample(prompts, min(probes.prompts, len(prompts)))
    if len(chosen) < 2:
        raise BadInput(
            f"critic_probes.set={entry.name}: has {len(chosen)} prompt, expected two at least"
        )
    return f"set {entry.name} of data.eval", [
        replace(prompt, cursor=place) for place, prompt in enumerate(chosen)
    ]


def draw(
    config: ProbedRunConfig,
    prompts: Sequence[Prompt],
    engines: Dispatcher,
    tokenizer: TextTokenizer,
    verifier: VerifierPool,
    phase: Phase,
    agents: Agents | AgentProcesses | None = None,
) -> Drawn:
    """Responses to prompts, states of them, and their continuations at the sampling settings of
    training.

    agents: play episodes instead, whose states are those before turns; a continuation repeats the
        turns before.

    Raises:
        RunFailed: an agent took another way in a repetition, or most groups have an episode that
            broke.
    """
    probes = config.critic_probes
    k = config.critic_probes.continuations
    if agents is None:
        collect = engines.collect
    else:
        collect = partial(engines.collect, generate=agents.generate)
    total = len(prompts) * probes.responses_per_prompt
    with phase("responses", total) as advance:
        request = GenerationRequest(
            prompts, probes.responses_per_prompt, config.sampling, probes.seed, WEIGHT_VERSION
        )
        responses = _whole(collect(request, advance), probes.responses_per_prompt)
    with phase("grades", len(responses)) as advance:
        grade_samples(responses, verifier, tokenizer.decode, config.reward, advance)
    graded = from_samples(responses)
    rewards = shaped_rewards(graded, config.algorithm.shaping)
    if agents is None:
        turns = None
        lengths = [len(sample.response_ids) for sample in responses]
    else:
        turns = [recorded_turns(response) for response in responses]
        lengths = list(map(len, turns))
    states = [
        (owner, int(share * length))
        for owner, length in enumerate(lengths)
        for share in probes.quantiles
    ]
    starts = [
        _prefix(responses[n], 0 if turns else at, len(prompts) + i)
        for i, (n, at) in enumerate(states)
    ]
    if turns:
        limits = None
    else:
        limits = [config.sampling.max_new_tokens - at for _, at in states]
    begun = turns and [turns[owner][: at + 1] for owner, at in states]
    with phase("continuations", len(starts) * k) as advance:
        request = GenerationRequest(
            starts, k, config.sampling, probes.seed, WEIGHT_VERSION, None, limits, begun
        )
        whole = _whole(collect(request, advance), k)
    if not turns:
        whole = [
            _joined(responses[states[tail.group][0]], states[tail.group][1], tail) for tail in whole
        ]
    with phase("grades of continuations", len(whole)) as advance:
        grade_samples(whole, verifier, tokenizer.decode, config.reward, advance)
    batch = from_samples(whole)
    kept = torch.tensor([sample.group for sample in whole[::k]])
    batch.rewards = shaped_rewards(batch, config.algorithm.shaping)
    owner, cuts = torch.tensor(states)[kept].unbind(1)
    before = [states[sample.group][1] for sample in whole]  # tokens, or turns
    if turns:
        before = [
            int(s.written[: s.turns[at][0]].sum()) for s, at in zip(whole, before, strict=True)
        ]
    return Drawn(
        batch,
        batch.response_cu_seqlens[:-1] + torch.tensor(before),
        leave_one_out(rewards, graded.group_ids)[owner],
        graded.group_ids[owner].unique(return_inverse=True)[1],
        cuts,
        kept % len(probes.quantiles),
        rewards,
    )


def choose_steps(config: ProbedRunConfig, tokenizer: TextTokenizer) -> list[list[Prompt]]:
    """The prompts of data.train that critic_probes.steps rollouts answer, in a random order; a
    prompt is drawn again only after all others."""
    prompts = train_prompts(config.data, tokenizer)
    shuffle = random.Random(config.critic_probes.seed)
    size = config.batch.prompts_per_step
    drawn = list[Prompt]()
    while len(drawn) < config.critic_probes.steps * size:
        drawn += shuffle.sample(prompts, len(prompts))
    drawn = [replace(prompt, cursor=place) for place, prompt in enumerate(drawn)]
    return [drawn[k * size : (k + 1) * size] for k in range(config.critic_probes.steps)]


def draw_steps(
    config: ProbedRunConfig,
    steps: Sequence[Sequence[Prompt]],
    engines: Dispatcher,
    tokenizer: TextTokenizer,
    verifier: VerifierPool,
    phase: Phase,
) -> list[ExperienceBatch]:
    """The graded responses of each step, rewards shaped, at the sampling settings of training."""
    batches = []
    samples = config.batch.samples_per_prompt
    with phase("responses", len(steps) * len(steps[0]) * samples) as advance:
        for prompts in steps:
            request = GenerationRequest(
                prompts, samples, config.sampling, config.critic_probes.seed, WEIGHT_VERSION
            )
            responses = engines.collect(request, advance)
            grade_samples(responses, verifier, tokenizer.decode, config.reward, lambda _: None)
            batch = from_samples(responses)
            batch.rewards = shaped_rewards(batch, config.algorithm.shaping)
            batches.append(batch)
    return batches


def _whole(samples: list[Sample], size: int) -> list[Sample]:
    """The groups of this size in which no episode broke. Raises RunFailed as draw()."""
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    whole = [group for group in groups if is_whole(group)]
    if len(whole) < max(2, len(groups) // 2):
        raise RunFailed(
            f"rollout.agent: episodes broke in {len(groups) - len(whole)} of {len(groups)} groups"
        )
    return [sample for group in whole for sample in group]


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
