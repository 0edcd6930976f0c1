"""The metrics of a step's rollout: reward, lengths, agreement with the engine, quality of the
critic."""

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
from vapo_megatron.training.token_rewards import paid

_REPETITION_SAMPLES = 256


def rollout_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """On rank 0: reward, accuracy and length of the samples; with windows, of those that are
    finished."""
    cut = float(batch.truncated.float().mean())
    if batch.window_starts is None:
        return _graded_metrics(batch.table()) | {
            names.TRUNCATED: cut,
            names.REPEATED: _repetition(batch),
        }
    row = {"rollout/goes_on_share": cut, names.REPEATED: _repetition(batch)}
    finished = (~batch.truncated).nonzero().squeeze(1)
    if len(finished):
        return row | _graded_metrics(batch.table().select(finished))
    return row


def _graded_metrics(samples: SampleTable) -> dict[str, float]:
    lengths = samples.response_lengths.float()
    rewards = samples.rewards
    groups = {}
    # Where each is of one response their rewards say nothing
    if int(samples.group_ids.bincount().max()) > 1:
        groups[names.FRAC_ZERO_STD_GROUPS] = frac_zero_std_groups(rewards, samples.group_ids)
    return groups | {
        names.REWARD: float(rewards.mean()),
        names.REWARD_MIN: float(rewards.min()),
        names.REWARD_MAX: float(rewards.max()),
        names.ACCURACY: float(samples.correct.float().mean()),
        names.LENGTH: float(lengths.mean()),
        names.LENGTH_MIN: float(lengths.min()),
        names.LENGTH_MAX: float(lengths.max()),
    }


def _repetition(batch: ExperienceBatch) -> float:
    """repeated_share of responses spread over the batch: of as many as take no time worth
    mentioning."""
    part = batch.select(range(0, batch.samples, -(-batch.samples // _REPETITION_SAMPLES)))
    written = torch.cat(
        [part.cu_seqlens[sample] + part.response_places(sample) for sample in range(part.samples)]
    )
    return repeated_share(part.tokens[written], part.response_cu_seqlens)


def policy_metrics(batch: ShardedBatch) -> dict[str, float]:
    """Collective: how far the trainer's policy is from the one that sampled, k3 of KL(rollout ||
    trainer) per token.

    Source: Schulman, "Approximating KL divergence" (2020); x ~ rollout, r = trainer / rollout, k3 =
        r - 1 - log r.
    """
    home = batch.local
    assert home.old_logprobs is not None and home.entropies is not None, (
        "the policy has not scored the batch"
    )
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
    home = batch.local
    assert home.old_logprobs is not None and home.ref_logprobs is not None, (
        "no log-probs: the batch is not scored"
    )
    (divergence,) = over_tokens(batch, k3(home.old_logprobs, home.ref_logprobs))
    return {names.REFERENCE_KL: divergence.mean, names.REFERENCE_KL_MAX: divergence.largest}


def importance_metrics(batch: ShardedBatch, weights: Tensor, log_ratio: Tensor) -> dict[str, float]:
    """Collective: metrics of importance weights [local T] and of the log ratios before they were
    capped."""
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
    assert batch.local.advantages is not None and batch.table.shaped_rewards is not None, (
        "estimate them first"
    )
    (statistics,) = over_tokens(batch, batch.local.advantages)
    row = {"advantage/mean": statistics.mean, "advantage/std": statistics.variance**0.5}
    rewards = batch.table.shaped_rewards
    if batch.table.window_starts is not None:
        rewards = rewards[~batch.table.truncated]
    if len(rewards):
        return row | {"reward/shaped_mean": float(rewards.mean())}
    return row


class OverTokens(NamedTuple):
    """Statistics over response tokens; the variance is biased. means: the mean of each sample,
    [S]."""

    means: Tensor
    mean: float
    variance: float
    least: float
    largest: float


def over_tokens(batch: ShardedBatch, *numbers: Tensor) -> list[OverTokens]:
    """Collective: statistics of numbers [local T]; with windows of new tokens alone, because
    earlier policies wrote the others."""
    bounds = batch.local.response_cu_seqlens
    starts = batch.local.window_starts
    if starts is not None:
        new = tokens_from(starts, bounds)
        numbers = tuple(x[new] for x in numbers)
        bounds = offsets(bounds.diff() - starts)
    whole = batch.gather_samples(torch.cat([extent(x, bounds) for x in numbers], dim=1))
    statistics = []
    lengths = batch.table.new_lengths
    for columns in whole.split(4, dim=1):
        means, spreads, least, largest = columns.unbind(1)
        mean, variance = critic_metrics.pooled(lengths, means, spreads)
        statistics.append(
            OverTokens(
                means, float(mean), float(variance), float(least.min()), float(largest.max())
            )
        )
    return statistics


def value_metrics(
    batch: ShardedBatch, values: Tensor, returns: Tensor, known: Tensor
) -> dict[str, float]:
    """Collective: how well values explain Monte-Carlo returns, both float32 [local T], next to free
    baselines (docs/critic.md). known: bool [S], the samples that have a return; the others count
    nowhere."""
    table = batch.table
    bounds = batch.local.response_cu_seqlens
    quantiles = tuple(p / 100 for p in names.BIAS_POSITIONS)
    every = critic_metrics.Figures.read(
        batch.gather_samples(critic_metrics.figures_of(values, returns, bounds, quantiles))
    )
    position = critic_metrics.explained_by_position(
        returns,
        bounds,
        batch.local_slice,
        table.response_lengths,
        table.group_ids,
        known,
        batch.sum_over_ranks,
        batch.gather_samples,
    )
    figures = every.only(known)
    correct = table.correct[known]
    whole = whole_figures(batch, values, returns, bounds, paid(batch.local), known)
    explained = critic_metrics.explained_beside_baselines(
        figures, table.group_ids[known], position, whole
    )
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
    metrics |= {
        f"{names.VALUE_BIAS}{p}": bias for p, bias in zip(names.BIAS_POSITIONS, biases, strict=True)
    }
    # NaN stands for the mean of nothing: no response ended that way.
    return {name: float(value) for name, value in metrics.items() if not value.isnan()}


def turn_metrics(
    batch: ShardedBatch,
    rewards: Tensor,
    turns: Tensor,
    responses: Tensor,
    gamma: float,
    known: Tensor,
) -> dict[str, float]:
    """Collective: what values of turns' first states explain of the returns from there on, beside
    the same baselines: the other responses of the group, and the number of the turn.

    rewards: float32 [local T]; turns, responses: of turn_bounds(), of the local samples; gamma:
        discount from turn to
    turn; known: bool [S], the samples that have a return.
    """
    values = batch.local.values
    assert values is not None, "no values: the batch is not scored"
    ones = torch.ones(batch.local.samples)
    _, returns = turn_gae(
        rewards, values, turns, responses, lam_policy=ones, lam_critic=ones, gamma=gamma
    )
    values = values[turns[:-1]]
    returns = returns[turns[:-1]]
    counts = batch.gather_samples(responses.diff())
    groups = batch.table.group_ids
    every = critic_metrics.Figures.read(
        batch.gather_samples(critic_metrics.figures_of(values, returns, responses))
    )
    position = critic_metrics.explained_by_position(
        returns,
        responses,
        batch.local_slice,
        counts,
        groups,
        known,
        batch.sum_over_ranks,
        batch.gather_samples,
    )
    before = paid(batch.local)[turns[:-1]]
    explained = critic_metrics.explained_beside_baselines(
        every.only(known),
        groups[known],
        position,
        whole_figures(batch, values, returns, responses, before, known),
    )
    metrics = {
        "critic/turn_explained_variance": explained.critic,
        "critic/turn_baseline_loo_ev": explained.leave_one_out,
        "critic/turn_baseline_position_ev": explained.position,
    }
    return {name: float(value) for name, value in metrics.items() if not value.isnan()}


def whole_figures(
    batch: ShardedBatch,
    values: Tensor,
    returns: Tensor,
    bounds: Tensor,
    before: Tensor,
    known: Tensor,
) -> critic_metrics.Figures | None:
    """Collective: Figures of returns and what was paid before each state, both [states], of the
    responses that have a return; None where turns bring no reward."""
    if batch.local.turn_rewards is None:
        return None
    columns = critic_metrics.figures_of(values, returns + before, bounds)
    return critic_metrics.Figures.read(batch.gather_samples(columns)).only(known)


def mean_of(rows: Sequence[dict[str, float]], maxima: Sequence[str] = ()) -> dict[str, float]:
    """Merge the metrics of several updates: mean, or max for maxima."""
    if not rows:
        return {}
    merged = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return merged | {name: max(row[name] for row in rows) for name in rows[0] if name in maxima}
