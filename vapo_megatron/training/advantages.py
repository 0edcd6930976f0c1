"""From rewards and values to advantages and value targets: the algorithms of vapo_megatron.algorithms, by config."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vapo_megatron.algorithms import advantages, importance, shaping
from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import sign_agreement
from vapo_megatron.algorithms.gae import bootstrap_of_truncated, decoupled_gae, length_adaptive_lambda, segmented_gae
from vapo_megatron.algorithms.kl import k1
from vapo_megatron.algorithms.off_policy import corrected_gae
from vapo_megatron.algorithms.segments import place_terminal, segment_sum, to_tokens
from vapo_megatron.algorithms.selection import loss_mask
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig, KlConfig, Lambda, ShapingConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.metrics import advantage_metrics, value_metrics
from vapo_megatron.training.user_functions import user_advantages, user_selection


def estimate_advantages(
    batch: ExperienceBatch, config: AlgorithmConfig, recorder: Recorder, new_critic: bool = False
) -> None:
    """Fill shaped_rewards, selected, advantages and, where there is a critic, returns of a scored batch.

    No communication. new_critic: nothing has trained the critic yet.
    """
    best, filtered = None, None
    with recorder.timer("advantages"):
        rewards = shaped_rewards(batch, config.shaping)
        batch.shaped_rewards = rewards
        if config.uses_critic:
            gae(batch, token_rewards(batch, rewards, config), config)
            lam = policy_lambda(batch, config.advantage)
            recorder.add(
                {"advantage/lambda_mean": float(lam.mean()), "advantage/lambda_clamped": clamped(lam, config.advantage)}
            )
        elif config.advantage.estimator == "reinforce_pp":
            penalty, bounds = kl_penalty(batch, config.kl), batch.response_cu_seqlens
            batch.advantages = advantages.reinforce_pp(rewards, penalty, bounds, 1.0, config.advantage.gamma)
        elif config.advantage.function is None:
            found = response_advantages(batch, rewards, config)
            batch.advantages = to_tokens(found, batch.response_cu_seqlens)
            if config.advantage.estimator == "raft":
                best = (found > 0) & batch.correct if config.advantage.raft_needs_correct else found > 0
        if config.advantage.function is not None:
            batch.advantages = user_advantages(config.advantage.function, batch)
        if config.filter_function is not None:
            filtered = user_selection(config.filter_function, batch)
            recorder.add({"filter/kept": float(filtered.float().mean())})
        batch.selected = loss_mask(batch.truncated, config.shaping.truncated == "mask", best, filtered)
        assert batch.advantages is not None, "the estimator has filled them in"
        of_selected = to_tokens(batch.selected, batch.response_cu_seqlens)
        batch.advantages = whiten(batch.advantages, of_selected, config.advantage)
    recorder.add(advantage_metrics(batch.advantages, rewards))
    recorder.add(critic_row(batch, config, new_critic))


def critic_row(batch: ExperienceBatch, config: AlgorithmConfig, new_critic: bool = False) -> dict[str, float]:
    """How good advantages and the critic's values are, on a batch that the critic has not yet learnt from.

    new_critic: it has never been updated.
    """
    bounds = batch.response_cu_seqlens
    assert batch.advantages is not None and batch.shaped_rewards is not None, "no advantages: estimate them first"
    known = to_tokens(returns_known(batch.truncated, config.shaping), bounds)
    row = {names.SIGN_AGREEMENT: float(sign_agreement(batch.advantages, batch.rewards, bounds, known))}
    if batch.values is None:
        return row
    rewards = token_rewards(batch, batch.shaped_rewards, config)
    returns = segmented_gae(rewards, torch.zeros_like(rewards), bounds, 1.0, config.advantage.gamma)
    # A residual critic's baseline differs between the responses of a group: its head's part is judged alone.
    baseline = 0.0 if batch.baselines is None else to_tokens(batch.baselines, bounds)
    faults = value_faults(batch.values - baseline, returns - baseline, bounds, batch.group_ids, known)
    if new_critic:
        faults = [fault for fault in faults if fault != "constant"]  # a new head is zero, and is not broken
    row |= value_metrics(batch.values, returns, bounds, batch.group_ids, batch.correct, known)
    return row | {f"{names.CRITIC_FAULT}{fault}": 1.0 for fault in faults}


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
    """Decoupled, length-adaptive GAE over token rewards [T] (VAPO, sections 4.1 and 4.2), corrected where that is asked
    for as if the policy that is trained had drawn the responses (V-trace)."""
    values, bounds = batch.values, batch.response_cu_seqlens
    assert values is not None, "no values: the batch is not scored"
    bootstraps = config.shaping.truncated == "bootstrap"
    estimator: Callable[..., tuple[Tensor, Tensor]] = decoupled_gae
    if config.advantage.off_policy == "vtrace":
        assert batch.old_logprobs is not None, "no log-probs: the batch is not scored"
        weights = importance.tis(batch.old_logprobs - batch.rollout_logprobs, 1.0)
        estimator = partial(corrected_gae, rho=weights, c=weights)
    batch.advantages, batch.returns = estimator(
        rewards,
        values,
        bounds,
        lam_policy=policy_lambda(batch, config.advantage),
        lam_critic=lambda_of(config.advantage.lambda_critic, batch, config.advantage),
        gamma=config.advantage.gamma,
        bootstrap_values=bootstrap_of_truncated(values, batch.truncated, bounds) if bootstraps else None,
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


def response_advantages(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Advantages from rewards [S] alone, the same for all tokens of a response: float32 [S].

    A KL penalty in the reward is that of the response, the sum over its tokens.
    """
    estimator = config.advantage.estimator
    rewards = rewards - segment_sum(kl_penalty(batch, config.kl), batch.response_cu_seqlens)
    if estimator == "remax":
        assert batch.greedy_rewards is not None, "no greedy rewards: they are collected with the batch"
        return advantages.remax(rewards, batch.greedy_rewards)
    estimators = {
        "grpo": advantages.grpo,
        "dr_grpo": advantages.dr_grpo,
        "rloo": advantages.rloo,
        "group_baseline": advantages.group_baseline,
        "raft": advantages.raft,
    }
    return estimators[estimator](rewards, batch.group_ids)


def whiten(found: Tensor, selected: Tensor, config: AdvantageConfig) -> Tensor:
    """Advantages [T], whitened where that is asked for over the tokens that carry loss (selected, bool [T]).

    Those of the others are 0 then. Value targets are never whitened.
    """
    if config.whiten == "none":
        return found
    return advantages.whiten(found, selected, shift_mean=config.whiten == "full")
