"""Values by regression of the tabular stage's responses, by the run's own code.

A seed's responses are written down as the batch that an engine would have returned: a prompt token,
decisions, filler, the answer and EOS. training/regression.py reads features from it as it does in a
run. Filler, answer and EOS are the only legal token where they stand: log-prob and entropy are 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical

from vapo_megatron.algorithms.tempo import tempo
from vapo_megatron.config.regression import RegressionConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.monitoring import names
from vapo_megatron.training.regression import ValueRegression, regressed_values, response_hashes
from vapo_megatron.training.shards import ShardedBatch, scatter

from .settings import ACTIONS, ANSWER_TOKENS
from .task import Rollout

# Tokens beside the actions. All answers are the same token: right or wrong is the reward's to say.
FILLER, ANSWER, EOS = range(ACTIONS, ACTIONS + 3)


def value_regression(features: Sequence[str]) -> ValueRegression:
    """The regression of a seed on these features and no others, before its first step."""
    chosen = {name: name in features for name in RegressionConfig.model_fields}
    return ValueRegression(RegressionConfig.model_validate(chosen))


def response_tokens(rollout: Rollout) -> Tensor:
    """What stands at each token of the responses: int32 [T]."""
    tokens = torch.full((len(rollout.state),), FILLER, dtype=torch.int32)
    ends = rollout.bounds[1:]
    tokens[ends - ANSWER_TOKENS] = ANSWER
    tokens[ends - 1] = EOS
    actions = rollout.action[rollout.decided]
    tokens[rollout.decision_token[rollout.decided]] = actions.int()
    return tokens


def at_decisions(rollout: Rollout, by_step: Tensor) -> Tensor:
    """Numbers by step at the tokens of decisions, 0 at all others: [seeds, samples, steps] ->
    float32 [T]."""
    by_token = torch.zeros(len(rollout.state))
    by_token[rollout.decision_token[rollout.decided]] = by_step[rollout.decided].float()
    return by_token


def decision_entropies(rollout: Rollout, logits: Tensor) -> Tensor:
    """Entropy of the policy at each step, in nats: [seeds, skills, ACTIONS] -> [seeds, samples,
    steps]."""
    by_skill = Categorical(logits=logits).entropy()
    return by_skill.gather(1, rollout.skill.flatten(1)).view(rollout.skill.shape)


def seed_batches(rollout: Rollout, logits: Tensor) -> list[ShardedBatch]:
    """The responses of each seed as a batch of one rank, with shaped rewards.

    logits: [seeds, skills, ACTIONS], of the policy that sampled.
    """
    seeds, samples = rollout.group.shape
    tokens = response_tokens(rollout)
    logprobs = at_decisions(rollout, rollout.logprobs)
    entropies = at_decisions(rollout, decision_entropies(rollout, logits))
    rewards = rollout.rewards.view(seeds, samples)
    batches = []
    for seed in range(seeds):
        _, of_seed, bounds = rollout.of_seed(seed)
        prompts = rollout.prompt[seed].int()
        written = ExperienceBatch(
            tokens=_with_prompts(prompts, tokens[of_seed], bounds),
            cu_seqlens=bounds + torch.arange(samples + 1),
            prompt_lengths=torch.ones(samples, dtype=torch.int64),
            response_cu_seqlens=bounds,
            rollout_logprobs=logprobs[of_seed],
            entropies=entropies[of_seed],
            rewards=rewards[seed],
            correct=rollout.correct[seed],
            truncated=torch.zeros(samples, dtype=torch.bool),
            group_ids=rollout.group[seed],
        )
        batch = scatter(written)
        batch.fill(shaped_rewards=rewards[seed])
        batches.append(batch)
    return batches


def _with_prompts(prompts: Tensor, tokens: Tensor, bounds: Tensor) -> Tensor:
    """Response tokens with the prompt's token before each response: int32 [S], [T], int64 [S + 1]
    -> int32 [T + S]."""
    is_prompt = torch.zeros(len(tokens) + len(prompts), dtype=torch.bool)
    is_prompt[bounds[:-1] + torch.arange(len(prompts))] = True
    sequences = torch.empty(len(is_prompt), dtype=torch.int32)
    sequences[is_prompt] = prompts
    sequences[~is_prompt] = tokens
    return sequences


def seed_values(
    batch: ShardedBatch, past: ValueRegression, tracked: Tensor | None
) -> tuple[Tensor, float, float]:
    """V~ of each token of a seed, float32 [T], trust g, and the explained variance of V~; the batch
    becomes part of the past.

    tracked: float64 [samples], the return of each response's prompt in earlier steps, for history.
    """
    known = torch.ones(batch.samples, dtype=torch.bool)
    values, trust, metrics = regressed_values(batch, known, past, tracked, None)
    return values, trust, metrics[names.EXPLAINED_CALIBRATED]


def tree_advantages(batch: ShardedBatch) -> Tensor:
    """TEMPO's advantage of each token of a seed, float32 [T]."""
    local = batch.local
    no_penalty = torch.zeros(local.response_tokens)
    hashes = response_hashes(local)
    return tempo(local.rewards, local.group_ids, hashes, local.response_cu_seqlens, no_penalty)
