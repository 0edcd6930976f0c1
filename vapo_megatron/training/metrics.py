"""The metrics of a step's rollout: reward, lengths, agreement with the engine, quality of the critic."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms import critic_metrics
from vapo_megatron.algorithms.gae import turn_gae
from vapo_megatron.algorithms.kl import k3
from vapo_megatron.algorithms.policy_loss import bounded_ratio
from vapo_megatron.algorithms.segments import extent, tokens_from
from vapo_megatron.algorithms.selection import frac_zero_std_groups
from vapo_megatron.algorithms.shaping import repeated_share
from vapo_megatron.data.batch import ExperienceBatch, SampleTable, offsets
from vapo_megatron.monitoring import names
from vapo_megatron.training.shards import ShardedBatch

_REPETITION_SAMPLES = 256


def rollout_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """On rank 0: reward, accuracy and length of the samples; with windows, of those that are finished."""
    cut = float(batch.truncated.float().mean())
    if batch.window_starts is None:
        return _graded_metrics(batch.table()) | {names.TRUNCATED: cut, names.REPEATED: _repetition(batch)}
    row = {"rollout/goes_on_share": cut, names.REPEATED: _repetition(batch)}
    finished = (~batch.truncated).nonzero().squeeze(1)
    return row | _graded_metrics(batch.table().select(finished)) if len(finished) else row


def _graded_metrics(samples: SampleTable) -> dict[str, float]:
    lengths, rewards = samples.response_lengths.float(), samples.rewards
    groups = {}
    if int(samples.group_ids.bincount().max()) > 1:  # where each is of one response their rewards say nothing
        groups[names.FRAC_ZERO_STD_GROUPS] = frac_zero_std_groups(rewards, samples.group_ids)
    return groups | {
        names.REWARD: float(rewards.mean()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        names.ACCURACY: float(samples.correct.float().mean()),
        names.LENGTH: float(lengths.mean()),
        names.LENGTH_MIN: float(lengths.min()),
        names.LENGTH_MAX: float(lengths.max()),
    }


def _repetition(batch: ExperienceBatch) -> float:
    """repeated_share of responses spread over the batch: of as many as take no time worth mentioning."""
    part = batch.select(range(0, batch.samples, -(-batch.samples // _REPETITION_SAMPLES)))
    written = torch.cat([part.cu_seqlens[sample] + part.response_places(sample) for sample in range(part.samples)])
    return repeated_share(part.tokens[written], part.response_cu_seqlens)


def policy_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Collective: how far the trainer's policy is from the one that sampled, k3 of KL(rollout || trainer) per token.

    Source: Schulman, "Approximating KL divergence" (2020); x ~ rollout, r = trainer / rollout, k3 = r - 1 - log r.
    """
    home = batch.own
    assert home.old_logprobs is not None and home.entropies is not None, "the policy has not scored the batch"
    log_ratio = home.old_logprobs - home.rollout_logprobs
    divergence = k3(home.rollout_logprobs, home.old_logprobs)
    statistics = over_tokens(batch, divergence, log_ratio.abs(), home.entropies)
    return {
        names.TRAIN_INFER_KL: statistics[0].mean,
        names.TRAIN_INFER_KL_MAX: statistics[0].largest,
        "actor/train_infer_logprob_diff_max": statistics[1].largest,
        names.ENTROPY: statistics[2].mean,
    }


def reference_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Collective: k3 of KL(policy || reference) per token, and its largest."""
    home = batch.own
    assert home.old_logprobs is not None and home.ref_logprobs is not None, "no log-probs: the batch is not scored"
    (divergence,) = over_tokens(batch, k3(home.old_logprobs, home.ref_logprobs))
    return {names.REFERENCE_KL: divergence.mean, names.REFERENCE_KL_MAX: divergence.largest}


def importance_metrics(batch: ShardedBatch, weights: Tensor, log_ratio: Tensor) -> dict[str, float]:
    """Collective: of importance weights [own T] and the log ratios that they were cut from: mean, least, share that was
    cut."""
    ratio = bounded_ratio(log_ratio)
    statistics = over_tokens(batch, weights, ratio, (weights != ratio).float())
    return {
        "importance/weight_mean": statistics[0].mean,
        "importance/weight_min": statistics[0].least,
        "importance/ratio_max": statistics[1].largest,
        "importance/cut_share": statistics[2].mean,
    }


def advantage_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Collective: of advantages and of rewards after shaping."""
    assert batch.own.advantages is not None and batch.table.shaped_rewards is not None, "estimate them first"
    (statistics,) = over_tokens(batch, batch.own.advantages)
    row = {"advantage/mean": statistics.mean, "advantage/std": statistics.variance**0.5}
    rewards = batch.table.shaped_rewards
    if batch.table.window_starts is not None:
        rewards = rewards[~batch.table.truncated]
    return row | {"reward/shaped_mean": float(rewards.mean())} if len(rewards) else row


class OverTokens(NamedTuple):
    """Statistics over response tokens; the variance is the biased one. means: those of each sample, [S]."""

    means: Tensor
    mean: float
    variance: float
    least: float
    largest: float


def over_tokens(batch: ShardedBatch, *numbers: Tensor) -> list[OverTokens]:
    """Collective: of numbers [own T]; with windows, of new tokens alone: the policy that the trainer has did not write
    the others."""
    bounds, starts = batch.own.response_cu_seqlens, batch.own.window_starts
    if starts is not None:
        new = tokens_from(starts, bounds)
        numbers, bounds = tuple(x[new] for x in numbers), offsets(bounds.diff() - starts)
    whole = batch.everywhere(torch.cat([extent(x, bounds) for x in numbers], dim=1))
    statistics, lengths = [], batch.table.new_lengths
    for columns in whole.split(4, dim=1):
        means, spreads, least, largest = columns.unbind(1)
        mean, variance = critic_metrics.pooled(lengths, means, spreads)
        statistics.append(OverTokens(means, float(mean), float(variance), float(least.min()), float(largest.max())))
    return statistics


def value_metrics(batch: ShardedBatch, values: Tensor, returns: Tensor, known: Tensor) -> dict[str, float]:
    """Collective: how well values explain Monte-Carlo returns, both float32 [own T], next to free baselines
    (docs/critic.md). known: bool [S], the samples that have a return; the others count nowhere."""
    table, bounds = batch.table, batch.own.response_cu_seqlens
    quantiles = tuple(p / 100 for p in names.BIAS_POSITIONS)
    every = critic_metrics.Figures.read(batch.everywhere(critic_metrics.figures_of(values, returns, bounds, quantiles)))
    position = critic_metrics.explained_by_position(
        *(returns, bounds, batch.at_home, table.response_lengths, table.group_ids, known),
        *(batch.summed, batch.everywhere),
    )
    figures, correct = every.only(known), table.correct[known]
    explained = critic_metrics.explained_beside_baselines(figures, table.group_ids[known], position)
    slope, intercept = critic_metrics.calibration(figures)
    good, bad = critic_metrics.bias_by_outcome(figures, correct)
    mean, variance = critic_metrics.pooled(every.tokens, every.values, every.values_spread)
    metrics = {
        names.EXPLAINED_VARIANCE: explained.critic,
        names.BASELINE_LOO: explained.leave_one_out,
        names.BASELINE_POSITION: explained.position,
        names.CRITIC_GAIN: explained.gain,
        names.CALIBRATION_SLOPE: slope,
        "critic/calibration_intercept": intercept,
        "critic/value_mean": mean,
        "critic/value_std": variance.sqrt(),
        f"{names.VALUE_BIAS}correct": good,
        f"{names.VALUE_BIAS}incorrect": bad,
    }
    biases = critic_metrics.bias_by_position(figures)
    metrics |= {f"{names.VALUE_BIAS}{p}": bias for p, bias in zip(names.BIAS_POSITIONS, biases, strict=True)}
    # NaN stands for the mean of nothing: no response ended that way.
    return {name: float(value) for name, value in metrics.items() if not value.isnan()}


def turn_metrics(
    batch: ShardedBatch, rewards: Tensor, turns: Tensor, responses: Tensor, gamma: float, known: Tensor
) -> dict[str, float]:
    """Collective: what values of turns' first states explain of the returns from there on, beside the same baselines:
    the other responses of the group, and the number of the turn.

    rewards: float32 [own T]; turns, responses: of turn_bounds(), of the samples at home; gamma: discount from turn to
    turn; known: bool [S], the samples that have a return.
    """
    home, ones = batch.own, torch.ones(batch.own.samples)
    assert home.values is not None, "no values: the batch is not scored"
    returns = turn_gae(rewards, home.values, turns, responses, lam_policy=ones, lam_critic=ones, gamma=gamma)[1]
    values, returns = home.values[turns[:-1]], returns[turns[:-1]]
    counts, groups = batch.everywhere(responses.diff()), batch.table.group_ids
    every = critic_metrics.Figures.read(batch.everywhere(critic_metrics.figures_of(values, returns, responses)))
    position = critic_metrics.explained_by_position(
        *(returns, responses, batch.at_home, counts, groups, known, batch.summed, batch.everywhere)
    )
    explained = critic_metrics.explained_beside_baselines(every.only(known), groups[known], position)
    metrics = {
        "critic/turn_explained_variance": explained.critic,
        "critic/turn_baseline_loo_ev": explained.leave_one_out,
        "critic/turn_baseline_position_ev": explained.position,
    }
    return {name: float(value) for name, value in metrics.items() if not value.isnan()}


def mean_of(rows: Sequence[dict[str, float]], maxima: Sequence[str] = ()) -> dict[str, float]:
    """Merge the metrics of several updates: mean, or max for maxima."""
    if not rows:
        return {}
    return {
        name: max(row[name] for row in rows) if name in maxima else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
