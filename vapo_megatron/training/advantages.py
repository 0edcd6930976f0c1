"""From rewards and values to advantages and value targets: the algorithms of vapo_megatron.algorithms, by config."""

from typing import Protocol

import torch
from torch import Tensor

from vapo_megatron.algorithms import advantages, shaping
from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import sign_agreement
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda, segmented_gae
from vapo_megatron.algorithms.kl import k1
from vapo_megatron.algorithms.segments import last_tokens, place_terminal, segment_sum, to_tokens
from vapo_megatron.algorithms.selection import loss_mask
from vapo_megatron.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    KlConfig,
    Lambda,
    ShapingConfig,
    ValueLossConfig,
)
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.monitoring import names
from vapo_megatron.training.metrics import value_metrics
from vapo_megatron.training.run import Run
from vapo_megatron.training.user_functions import user_advantages, user_selection


def estimate_advantages(run: Run, batch: ExperienceBatch) -> None:
    """Fill advantages and, where there is a critic, returns [T] of a scored batch. No communication."""
    config, best, filtered = run.config.algorithm, None, None
    with run.recorder.timer("advantages"):
        rewards = shaped_rewards(batch, config.shaping)
        batch.shaped_rewards = rewards
        if config.uses_critic:
            gae(batch, token_rewards(batch, rewards, config), config)
            lam = policy_lambda(batch, config.advantage)
            run.recorder.add(
                {"advantage/lambda_mean": float(lam.mean()), "advantage/lambda_clamped": clamped(lam, config.advantage)}
            )
        elif config.advantage.function is None:
            found = without_critic(batch, rewards, config)
            batch.advantages = found
            if config.advantage.estimator == "raft":
                best = found[batch.response_cu_seqlens[:-1]] > 0
                best = best & batch.correct if config.advantage.raft_needs_correct else best
        if config.advantage.function is not None:
            batch.advantages = user_advantages(config.advantage.function, batch)
        if config.filter_function is not None:
            filtered = user_selection(config.filter_function, batch)
            run.recorder.add({"filter/kept": float(filtered.float().mean())})
        batch.selected = loss_mask(batch.truncated, config.shaping.truncated == "mask", best, filtered)
        found = whiten(batch, batch.selected, config.advantage)
        batch.advantages = found
    run.recorder.add({"advantage/mean": float(found.mean()), "advantage/std": float(found.std(correction=0))})
    run.recorder.add({"reward/shaped_mean": float(rewards.mean())})
    record_critic(run, batch)


def record_critic(run: Run, batch: ExperienceBatch) -> None:
    """Put into the step's row how good the critic's values are, on a batch that it has not yet learnt from."""
    config, bounds = run.config.algorithm, batch.response_cu_seqlens
    assert batch.advantages is not None and batch.shaped_rewards is not None, "no advantages: estimate them first"
    known = to_tokens(returns_known(batch.truncated, config.shaping), bounds)
    run.recorder.add({names.SIGN_AGREEMENT: float(sign_agreement(batch.advantages, batch.rewards, bounds, known))})
    if batch.values is not None:
        rewards = token_rewards(batch, batch.shaped_rewards, config)
        returns = segmented_gae(rewards, torch.zeros_like(rewards), bounds, 1.0, config.advantage.gamma)
        run.recorder.add(value_metrics(batch.values, returns, bounds, batch.group_ids, batch.correct, known))
        faults = value_faults(batch.values, returns, bounds, batch.group_ids, known)
        run.recorder.add({f"{names.CRITIC_FAULT}{fault}": 1.0 for fault in faults})


def returns_known(truncated: Tensor, config: ShapingConfig) -> Tensor:
    """Responses with a Monte-Carlo return; a truncated one has none unless it counts as wrong. [S] -> bool [S]."""
    return ~truncated if config.truncated != "terminal" else torch.ones_like(truncated)


def baselines_of(rewards: Tensor, group_ids: Tensor, config: ValueLossConfig) -> Tensor | None:
    """What a residual critic's head adds to, the mean of the other responses of the group: float32 [S]; else None."""
    return leave_one_out(rewards, group_ids).float() if config.residual else None


class Graded(Protocol):
    """What shaping reads of S responses, whole groups of them.

    Attributes:
        rewards: float32 [S].
        correct: bool [S].
        group_ids: int64 [S].
    """

    rewards: Tensor
    correct: Tensor
    group_ids: Tensor

    @property
    def response_lengths(self) -> Tensor:
        """int64 [S]."""


def shaped_rewards(batch: Graded, config: ShapingConfig) -> Tensor:
    """The verifier's rewards and what shaping adds to them. float32 [S]."""
    rewards = batch.rewards.clone()
    if config.soft_overlong is not None:
        limits = config.soft_overlong
        rewards += shaping.soft_overlong(batch.response_lengths, limits.max_length, limits.cache_length)
    if config.length_reward_coef:
        rewards += config.length_reward_coef * shaping.kimi_length_reward(
            batch.response_lengths, batch.correct, batch.group_ids
        )
    return rewards


def kl_penalty(batch: ExperienceBatch, config: KlConfig) -> Tensor:
    """What the KL to the reference takes from the reward of every token, float32 [T]."""
    if config.placement != "reward":
        return torch.zeros(batch.response_tokens)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "no log-probs: the batch is not scored"
    return config.coef * k1(batch.old_logprobs, batch.ref_logprobs)


def token_rewards(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """The reward [S] on the last token of each response, less the KL penalty of every token. float32 [T].

    A truncated response has no reward where a value stands for what would have followed.
    """
    if config.shaping.truncated == "bootstrap":
        rewards = rewards.masked_fill(batch.truncated, 0)
    return place_terminal(rewards, batch.response_cu_seqlens, batch.response_tokens) - kl_penalty(batch, config.kl)


def gae(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig) -> None:
    """Decoupled, length-adaptive GAE over token rewards [T] (VAPO, sections 4.1 and 4.2)."""
    values, bounds = batch.values, batch.response_cu_seqlens
    assert values is not None, "no values: the batch is not scored"
    bootstrap = None
    if config.shaping.truncated == "bootstrap":
        responses, last = last_tokens(bounds)
        bootstrap = torch.zeros(batch.samples)
        bootstrap[responses] = values[last] * batch.truncated[responses]
    batch.advantages, batch.returns = decoupled_gae(
        rewards,
        values,
        bounds,
        lam_policy=policy_lambda(batch, config.advantage),
        lam_critic=lambda_of(config.advantage.lambda_critic, batch, config.advantage),
        gamma=config.advantage.gamma,
        bootstrap_values=bootstrap,
    )


def lambda_of(choice: Lambda, batch: ExperienceBatch, config: AdvantageConfig) -> Tensor:
    """The lambda of each response, float32 [S]."""
    if choice == "length_adaptive":
        return length_adaptive_lambda(
            batch.response_lengths, config.length_adaptive_alpha, config.length_adaptive_floor
        )
    return torch.full((batch.samples,), float(choice))


def policy_lambda(batch: ExperienceBatch, config: AdvantageConfig) -> Tensor:
    """The lambda of the advantages of each response, float32 [S]."""
    return lambda_of(config.lambda_policy, batch, config)


def clamped(lam: Tensor, config: AdvantageConfig) -> float:
    """Share of responses so short that their length-adaptive lambda stands at its lower bound."""
    if config.lambda_policy != "length_adaptive":
        return 0.0
    return float((lam <= config.length_adaptive_floor).float().mean())


def without_critic(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Advantages from rewards [S] alone: of each token for reinforce_pp, else the same for a whole response.

    A KL penalty in the reward is then that of the response, the sum over its tokens. float32 [T].
    """
    groups, bounds, estimator = batch.group_ids, batch.response_cu_seqlens, config.advantage.estimator
    penalty = kl_penalty(batch, config.kl)
    if estimator == "reinforce_pp":
        return advantages.reinforce_pp(rewards, penalty, bounds, 1.0, config.advantage.gamma)
    rewards = rewards - segment_sum(penalty, bounds)
    if estimator == "remax":
        assert batch.greedy_rewards is not None, "no greedy rewards: they are collected with the batch"
        return to_tokens(advantages.remax(rewards, batch.greedy_rewards), bounds)
    estimators = {
        "grpo": advantages.grpo,
        "dr_grpo": advantages.dr_grpo,
        "rloo": advantages.rloo,
        "group_baseline": advantages.group_baseline,
        "raft": advantages.raft,
    }
    return to_tokens(estimators[estimator](rewards, groups), bounds)


def whiten(batch: ExperienceBatch, selected: Tensor, config: AdvantageConfig) -> Tensor:
    """The advantages, whitened where that is asked for over the tokens of the selected responses, bool [S].

    Those of the others, which carry no loss, are 0 then. Value targets are never whitened.
    """
    found = batch.advantages
    assert found is not None, "no advantages: the estimator has not filled them in"
    if config.whiten == "none":
        return found
    return advantages.whiten(found, to_tokens(selected, batch.response_cu_seqlens), shift_mean=config.whiten == "full")
