"""Computes advantages and value targets from rewards and values, by the config, with vapo_megatron.algorithms."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.algorithms import advantages, calibration, importance, shaping
from vapo_megatron.algorithms.baselines import leave_one_out, siblings_mean, tracked_values, with_responses
from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, explained, figures_of, sign_agreement, signs_of
from vapo_megatron.algorithms.gae import (
    bootstrap_of_truncated,
    decoupled_gae,
    length_adaptive_lambda,
    segmented_gae,
    turn_bounds,
    turn_gae,
)
from vapo_megatron.algorithms.importance import corrected_gae
from vapo_megatron.algorithms.kl import k1
from vapo_megatron.algorithms.segments import place_terminal, segment_sum, to_tokens, tokens_from
from vapo_megatron.algorithms.selection import loss_mask
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig, Lambda, ShapingConfig
from vapo_megatron.config.policy import KlConfig
from vapo_megatron.data.batch import ExperienceBatch, SampleTable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.metrics import advantage_metrics, turn_metrics, value_metrics
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.user_functions import user_advantages, user_metrics, user_selection

# File of a checkpoint with the returns that ReturnHistory has tracked.
TRACKER_FILE = "tracked_returns.json"


class ReturnHistory:
    """The returns of past steps, summed up; the same on every rank, and part of checkpoints.

    Attributes:
        past: for advantage.calibration.
        tracked: for advantage.tracker, by a prompt's key the faded sums of its returns and of its responses.
    """

    def __init__(self, state: list[Any] | None = None, tracked: bytes = b"") -> None:
        """state and tracked: of a checkpoint."""
        self.past = calibration.Moments.from_state(state) if state else None
        self.tracked: dict[str, Sequence[float]] = json.loads(tracked or b"{}")

    def state(self) -> list[Any]:
        """For a checkpoint; empty before the first step."""
        return self.past.state() if self.past is not None else []

    def tracked_state(self) -> bytes:
        """For a checkpoint's TRACKER_FILE; empty without a tracker."""
        return json.dumps(self.tracked).encode() if self.tracked else b""

    def add(self, step: calibration.Moments) -> None:
        """Remember a step, and forget a part of those before it."""
        self.past = step if self.past is None else self.past.followed_by(step)

    def track(self, keys: Tensor, returns: Tensor, known: Tensor) -> tuple[Tensor, float]:
        """Baselines of S responses from what earlier steps said of their prompts, and then remember these.

        Args:
            keys: int64 [S], of prompts.
            returns: [S].
            known: bool [S], the responses that have a return.

        Returns:
            float64 [S], 0 where the return is not known; the share of known ones whose prompt has a history: the others
            have the mean of the other responses of the batch.
        """
        keys, returns, baselines = keys[known], returns[known], torch.zeros(len(keys), dtype=torch.float64)
        sums, weights = self._sums(keys)
        baselines[known] = tracked_values(sums, weights, leave_one_out(returns, torch.arange(len(returns))))
        prompts, owner, counts = keys.unique(return_inverse=True, return_counts=True)
        totals = torch.zeros(len(prompts), dtype=torch.float64).index_add_(0, owner, returns.double())
        faded_sums, faded_weights = self._sums(prompts)
        after = with_responses(faded_sums, faded_weights, totals, counts.double())
        self.tracked |= zip(map(str, prompts.tolist()), torch.stack(after, 1).tolist(), strict=True)
        return baselines, float((weights > 0).double().sum() / max(1, len(weights)))

    def _sums(self, keys: Tensor) -> Tensor:
        rows = [self.tracked.get(str(key), (0.0, 0.0)) for key in keys.tolist()]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2).t()


def calibrated_advantages(
    batch: ShardedBatch,
    token_rewards: Tensor,
    lam: Tensor,
    known: Tensor,
    history: ReturnHistory,
    config: AdvantageConfig,
) -> tuple[Tensor, dict[str, float]]:
    """Collective: A = g GAE(V~) + (1 - g) (R - V~), and metrics; the batch becomes part of the history.

    Args:
        batch: with values and shaped rewards.
        token_rewards: float32 [own T].
        lam: float32 [own S], lambda of each response.
        known: bool [S], the responses that have a return: the others say nothing of later ones.
        history: past steps. Without any, V~ is the mean of the others and g is 0.
        config: says what takes part. With tracker m is the history of the prompt; with calibration=values g is 1.

    Returns:
        float32 [own T], metrics by name.
    """
    home, table, bounds = batch.own, batch.table, batch.own.response_cu_seqlens
    assert home.values is not None and table.shaped_rewards is not None, "values and rewards come before advantages"
    returns = table.shaped_rewards
    siblings, others = torch.zeros(2, batch.samples, dtype=torch.float64)
    siblings[known] = siblings_mean(returns[known], table.group_ids[known])
    others[known] = leave_one_out(returns[known], table.group_ids[known])
    metrics: dict[str, float] = {}
    if config.tracker:
        assert table.prompt_keys is not None, "a batch of samples knows their prompts"
        siblings, metrics[names.TRACKED] = history.track(table.prompt_keys, returns, known)
    fit = calibration.coefficients(history.past) if history.past is not None else None
    at_home = siblings[batch.at_home], others[batch.at_home]
    values, trust = calibration.baseline_and_trust(home.values, *at_home, bounds, fit)
    if fit is not None:
        metrics |= {names.CRITIC_SLOPE: fit.slope, names.GROUP_WEIGHT: fit.group_weight}
    trust = trust if config.calibration == "trust" else 1.0
    if known.any():
        own_returns = to_tokens(returns[batch.at_home], bounds)
        figures = Figures.read(batch.everywhere(figures_of(values, own_returns, bounds))).only(known)
        metrics |= {names.EXPLAINED_CALIBRATED: float(explained(figures)), names.TRUST: trust}
        sums = batch.everywhere(calibration.response_sums(home.values, bounds))[known]
        history.add(calibration.moments(sums, returns[known], siblings[known]))
    of = table.response_lengths
    return calibration.trusted_advantages(token_rewards, values, bounds, lam, trust, of), metrics


def estimate_advantages(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    new_critic: bool = False,
    history: ReturnHistory | None = None,
) -> None:
    """Collective: fill shaped_rewards, selected, advantages and, where there is a critic, returns of a scored batch.

    new_critic: nothing has trained the critic yet. history: of the run, for calibration and tracker.
    """
    best, filtered, home, table = None, None, batch.own, batch.table
    with recorder.timer("advantages"):
        rewards = shaped_rewards(table, config.shaping)
        batch.fill(shaped_rewards=rewards)
        if config.uses_critic:
            gae(home, token_rewards(home, config), config, table.response_lengths)
            if config.advantage.calibration != "none":
                assert history is not None, "the run's history of returns calibrates values"
                home.advantages, row = calibrated_advantages(
                    *(batch, token_rewards(home, config), policy_lambda(home.response_lengths, config.advantage)),
                    *(returns_known(table.truncated, config.shaping), history, config.advantage),
                )
                recorder.add(row)
            lam = policy_lambda(table.response_lengths, config.advantage)
            recorder.add(
                {"advantage/lambda_mean": float(lam.mean()), "advantage/lambda_clamped": clamped(lam, config.advantage)}
            )
        elif config.advantage.estimator == "reinforce_pp":
            penalty, bounds = kl_penalty(home, config.kl), home.response_cu_seqlens
            home.advantages = advantages.reinforce_pp(
                *(rewards[batch.at_home], penalty, bounds, config.advantage.gamma, table.response_lengths),
                earlier=home.turn_rewards,
            )
        elif config.advantage.function is None:
            estimate = response_advantages(batch, rewards, config, recorder, history)
            home.advantages = to_tokens(estimate[batch.at_home], home.response_cu_seqlens)
            if config.advantage.estimator == "raft":
                best = (estimate > 0) & table.correct
        if config.advantage.function is not None:
            answer = batch.columns_of_whole(partial(user_advantages, config.advantage.function, config.uses_critic), 2)
            home.advantages, targets = answer.t().contiguous()
            home.returns = home.returns if targets.isnan().any() else targets
        if config.filter_function is not None:
            filtered = batch.on_whole(partial(user_selection, config.filter_function))
            recorder.add({"filter/kept": float(filtered.float().mean())})
        batch.fill(selected=loss_mask(table.truncated, config.shaping.truncated == "mask", best, filtered))
        assert home.advantages is not None, "the estimator has filled them in"
        home.advantages = whiten(batch, home.advantages, config.advantage)
        if config.kl.placement == "advantage":
            assert home.old_logprobs is not None and home.ref_logprobs is not None, "the batch is not scored"
            home.advantages = advantages.distilled(
                home.advantages, home.old_logprobs, home.ref_logprobs, config.kl.coef
            )
    recorder.add(advantage_metrics(batch))
    if config.metrics_function is not None:
        recorder.add(batch.on_whole(partial(user_metrics, config.metrics_function)))
    recorder.add(critic_row(batch, config, new_critic))


def critic_row(batch: ShardedBatch, config: AlgorithmConfig, new_critic: bool = False) -> dict[str, float]:
    """Collective: how good advantages and the critic's values are, on a batch that the critic has not yet learnt from.

    new_critic: it has never been updated.
    """
    home, table, bounds = batch.own, batch.table, batch.own.response_cu_seqlens
    assert home.advantages is not None, "no advantages: estimate them first"
    finished = returns_known(table.truncated, config.shaping)
    if not finished.any():
        return {}
    signs = batch.everywhere(signs_of(home.advantages, bounds))[finished]
    row = {
        names.SIGN_AGREEMENT: float(sign_agreement(signs, table.response_lengths[finished], table.rewards[finished]))
    }
    if home.values is None:
        return row
    rewards = token_rewards(home, config)
    of, gamma = table.response_lengths, config.advantage.gamma
    returns = segmented_gae(rewards, torch.zeros_like(rewards), bounds, 1.0, gamma, of=of)
    figures = Figures.read(batch.everywhere(figures_of(home.values, returns, bounds)))
    faults = value_faults(figures, table.group_ids, finished)
    if new_critic:
        faults = [fault for fault in faults if fault != "constant"]  # a new head is zero, and is not broken
    row |= value_metrics(batch, home.values, returns, finished)
    if config.advantage.credit == "turn":
        row |= turn_metrics(batch, rewards, *turns_of(home), gamma, finished)
    return row | {f"{names.CRITIC_FAULT}{fault}": 1.0 for fault in faults}


def returns_known(truncated: Tensor, config: ShapingConfig) -> Tensor:
    """Responses with a Monte-Carlo return; a truncated one has none unless it counts as wrong. [S] -> bool [S]."""
    return ~truncated if config.truncated != "terminal" else torch.ones_like(truncated)


def teaches_critic(batch: ExperienceBatch | SampleTable, config: ShapingConfig) -> Tensor:
    """Responses that the critic learns from, of those that carry loss: bool [S]."""
    assert batch.selected is not None, "nothing is selected: estimate_advantages comes first"
    return batch.selected & ~batch.truncated if config.truncated == "window" else batch.selected


def new_tokens(batch: ExperienceBatch) -> Tensor | None:
    """The response tokens that the policy was not trained on in an earlier window: bool [T]; None: all of them."""
    return None if batch.window_starts is None else tokens_from(batch.window_starts, batch.response_cu_seqlens)


def shaped_rewards(batch: ExperienceBatch | SampleTable, config: ShapingConfig) -> Tensor:
    """The verifier's rewards and what shaping adds to them, of whole groups. float32 [S]."""
    rewards = batch.rewards.clone()
    if config.soft_overlong is not None:
        limits = config.soft_overlong
        rewards += shaping.soft_overlong(batch.response_lengths, limits.max_length, limits.cache_length)
    return rewards


def kl_penalty(batch: ExperienceBatch, config: KlConfig) -> Tensor:
    """The KL penalty that is subtracted from the reward of every token, float32 [T]."""
    if config.placement != "reward":
        return torch.zeros(batch.response_tokens)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "no log-probs: the batch is not scored"
    return config.coef * k1(batch.old_logprobs, batch.ref_logprobs)


def token_rewards(batch: ExperienceBatch, config: AlgorithmConfig) -> Tensor:
    """Rewards of tokens: those given to earlier turns, the rest of the shaped reward on the last token, minus the KL
    penalty of each token. float32 [T].

    A truncated response that is bootstrapped from a value has no reward at its end.
    """
    rewards = batch.shaped_rewards
    assert rewards is not None, "no shaped rewards: estimate_advantages comes first"
    earlier, bounds = batch.turn_rewards, batch.response_cu_seqlens
    if config.shaping.bootstraps:
        before = 0 if earlier is None else segment_sum(earlier, bounds)
        rewards = torch.where(batch.truncated, before, rewards)
    return place_terminal(rewards, bounds, batch.response_tokens, earlier) - kl_penalty(batch, config.kl)


def gae(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig, of: Tensor) -> None:
    """Decoupled, length-adaptive GAE over token rewards [T] (VAPO, sections 4.1 and 4.2), corrected where that is asked
    for as if the policy that is trained had drawn the responses (V-trace).

    An unfinished response goes on from V of its last state where shaping.truncated says so; T-PPO's window (arXiv
    2506.15050) learns no value from it (teaches_critic).

    of: int64, the lengths of all responses of which these are a part. With credit=turn turns take the place of tokens,
    and the length-adaptive lambda counts them.
    """
    values, bounds, lengths = batch.values, batch.response_cu_seqlens, batch.response_lengths
    assert values is not None, "no values: the batch is not scored"
    estimator: Callable[..., tuple[Tensor, Tensor]] = partial(decoupled_gae, cu_seqlens=bounds, of=of)
    if config.advantage.credit == "turn":
        turns, responses = turns_of(batch)
        estimator, lengths = partial(turn_gae, turns=turns, responses=responses), responses.diff()
    elif config.advantage.off_policy == "vtrace":
        assert batch.old_logprobs is not None, "no log-probs: the batch is not scored"
        weights = importance.tis(batch.old_logprobs - batch.rollout_logprobs, 1.0)
        estimator = partial(corrected_gae, cu_seqlens=bounds, rho=weights, c=weights)
    batch.advantages, batch.returns = estimator(
        rewards,
        values,
        lam_policy=policy_lambda(lengths, config.advantage),
        lam_critic=lambda_of(config.advantage.lambda_critic, lengths, config.advantage),
        gamma=config.advantage.gamma,
        bootstrap_values=bootstrap_of_truncated(values, batch.truncated, bounds) if config.shaping.bootstraps else None,
    )


def turns_of(batch: ExperienceBatch) -> tuple[Tensor, Tensor]:
    """Bounds of turns among response tokens, and of responses among turns: int64 [U + 1], [S + 1]."""
    if batch.loss_mask is None:
        return batch.response_cu_seqlens, torch.arange(batch.samples + 1)
    return turn_bounds(batch.loss_mask.nonzero().squeeze(1), batch.response_cu_seqlens)


def lambda_of(choice: Lambda, lengths: Tensor, config: AdvantageConfig) -> Tensor:
    """The lambda of responses of these lengths, float32 [S]."""
    if choice == "length_adaptive":
        return length_adaptive_lambda(lengths, config.length_adaptive_alpha, config.length_adaptive_floor)
    return torch.full((len(lengths),), float(choice))


def policy_lambda(lengths: Tensor, config: AdvantageConfig) -> Tensor:
    """The lambda of the advantages of responses of these lengths, float32 [S]."""
    return lambda_of(config.lambda_policy, lengths, config)


def clamped(lam: Tensor, config: AdvantageConfig) -> float:
    """Share of responses so short that their length-adaptive lambda is at its lower bound."""
    if config.lambda_policy != "length_adaptive":
        return 0.0
    return float((lam <= config.length_adaptive_floor).float().mean())


def response_advantages(
    batch: ShardedBatch, rewards: Tensor, config: AlgorithmConfig, recorder: Recorder, history: ReturnHistory | None
) -> Tensor:
    """Collective: advantages from rewards [S] alone, the same for all tokens of a response: float32 [S].

    A KL penalty in the reward is that of the response, the sum over its tokens.
    """
    estimator, home, table = config.advantage.estimator, batch.own, batch.table
    if config.kl.placement == "reward":
        rewards = rewards - batch.everywhere(segment_sum(kl_penalty(home, config.kl), home.response_cu_seqlens))
    if estimator == "remax":
        assert table.greedy_rewards is not None, "no greedy rewards: they are collected with the batch"
        return advantages.remax(rewards, table.greedy_rewards)
    if config.advantage.tracker:
        assert history is not None and table.prompt_keys is not None, "the run tracks the returns of its prompts"
        finished = returns_known(table.truncated, config.shaping)
        baselines, share = history.track(table.prompt_keys, rewards, finished)
        recorder.add({names.TRACKED: share})
        return (rewards - baselines).float()
    estimators = {
        "grpo": advantages.grpo,
        "dr_grpo": advantages.dr_grpo,
        "rloo": advantages.rloo,
        "group_baseline": advantages.group_baseline,
        "batch_baseline": advantages.batch_baseline,
        "raft": advantages.raft,
    }
    return estimators[estimator](rewards, table.group_ids)


def whiten(batch: ShardedBatch, found: Tensor, config: AdvantageConfig) -> Tensor:
    """Collective: advantages [own T], whitened where that is asked for over the tokens of all samples that carry loss.

    Those of the others are 0 then. Value targets are never whitened.
    """
    if config.whiten == "none":
        return found
    assert batch.own.selected is not None, "what carries loss is known before"
    bounds = batch.own.response_cu_seqlens
    selected, new = to_tokens(batch.own.selected, bounds), new_tokens(batch.own)
    selected = selected if new is None else selected & new
    sums = batch.everywhere(advantages.whitening_sums(found, selected, bounds))
    return advantages.whiten(found, selected, shift_mean=config.whiten == "full", sums=sums)
