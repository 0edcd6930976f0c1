"""What a step reports of its rollout: reward, lengths, agreement with the engine, quality of the critic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithms import critic_metrics
from vapo_megatron.algorithms.kl import k3
from vapo_megatron.algorithms.policy_loss import bounded_ratio
from vapo_megatron.algorithms.repetition import repeated_share
from vapo_megatron.algorithms.selection import frac_zero_std_groups
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.monitoring import names

_REPETITION_SAMPLES = 256


def rollout_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """Reward, accuracy and length of the samples."""
    lengths, rewards = batch.response_lengths.float(), batch.rewards
    return {
        names.REWARD: float(rewards.mean()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        names.FRAC_ZERO_STD_GROUPS: frac_zero_std_groups(rewards, batch.group_ids),
        names.ACCURACY: float(batch.correct.float().mean()),
        names.LENGTH: float(lengths.mean()),
        names.LENGTH_MIN: float(lengths.min()),
        names.LENGTH_MAX: float(lengths.max()),
        names.TRUNCATED: float(batch.truncated.float().mean()),
        names.REPEATED: _repetition(batch),
    }


def _repetition(batch: ExperienceBatch) -> float:
    """repeated_share of responses spread over the batch: of as many as take no time worth mentioning."""
    part = batch.select(range(0, batch.samples, -(-batch.samples // _REPETITION_SAMPLES)))
    starts = (part.cu_seqlens[:-1] + part.prompt_lengths).repeat_interleave(part.response_lengths)
    offsets = torch.arange(part.response_tokens) - part.response_cu_seqlens[:-1].repeat_interleave(
        part.response_lengths
    )
    return repeated_share(part.tokens[starts + offsets], part.response_cu_seqlens)


def policy_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """How far the trainer's policy is from the one that sampled: k3 of KL(rollout || trainer) a token, and its largest.

    Source: Schulman, "Approximating KL divergence" (2020); x ~ rollout, r = trainer / rollout, k3 = r - 1 - log r.
    """
    assert batch.old_logprobs is not None and batch.entropies is not None, "the policy has not scored the batch"
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    divergence = k3(batch.rollout_logprobs, batch.old_logprobs)
    return {
        names.TRAIN_INFER_KL: float(divergence.mean()),
        names.TRAIN_INFER_KL_MAX: float(divergence.max()),
        "actor/train_infer_logprob_diff_max": float(log_ratio.abs().max()),
        names.ENTROPY: float(batch.entropies.mean()),
    }


def reference_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """k3 of KL(policy || reference) a token, and its largest."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "no log-probs: the batch is not scored"
    divergence = k3(batch.old_logprobs, batch.ref_logprobs)
    return {names.REFERENCE_KL: float(divergence.mean()), names.REFERENCE_KL_MAX: float(divergence.max())}


def importance_metrics(weights: Tensor, log_ratio: Tensor) -> dict[str, float]:
    """Of importance weights [T] and the log ratios that they were cut from: mean, least, share that was cut."""
    return {
        "importance/weight_mean": float(weights.mean()),
        "importance/weight_min": float(weights.min()),
        "importance/ratio_max": float(bounded_ratio(log_ratio).max()),
        "importance/cut_share": float((weights != bounded_ratio(log_ratio)).float().mean()),
    }


def advantage_metrics(advantages: Tensor, shaped_rewards: Tensor) -> dict[str, float]:
    """Of advantages [T] and of rewards [S] after shaping."""
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
        "reward/shaped_mean": float(shaped_rewards.mean()),
    }


def value_metrics(
    values: Tensor, returns: Tensor, cu_seqlens: Tensor, group_ids: Tensor, correct: Tensor, known: Tensor
) -> dict[str, float]:
    """What values say of Monte-Carlo returns, beside free baselines, of S packed responses (docs/critic.md).

    Args:
        values, returns: float32 [T].
        cu_seqlens: int64 [S + 1].
        group_ids: int64 [S].
        correct: bool [S].
        known: [T], not 0 on the tokens whose return is known; the others count nowhere.
    """
    found = critic_metrics.explained_beside_baselines(values, returns, cu_seqlens, group_ids, known)
    slope, intercept = critic_metrics.calibration(values, returns, known)
    good, bad = critic_metrics.bias_by_outcome(values, returns, correct, cu_seqlens, known)
    good_end, bad_end = critic_metrics.bias_at_end(values, returns, correct, cu_seqlens, known)
    quantiles = tuple(p / 100 for p in names.BIAS_POSITIONS)
    biases = critic_metrics.bias_by_position(values, returns, cu_seqlens, quantiles, known)
    metrics = {
        names.EXPLAINED_VARIANCE: found.critic,
        names.BASELINE_LOO: found.leave_one_out,
        names.BASELINE_POSITION: found.position,
        names.CRITIC_GAIN: found.gain,
        names.CALIBRATION_SLOPE: slope,
        "critic/calibration_intercept": intercept,
        "critic/value_mean": values.mean(),
        "critic/value_std": values.std(correction=0),
        f"{names.VALUE_BIAS}correct": good,
        f"{names.VALUE_BIAS}incorrect": bad,
        f"{names.VALUE_BIAS}end_correct": good_end,
        f"{names.VALUE_BIAS}end_incorrect": bad_end,
    }
    metrics |= {f"{names.VALUE_BIAS}{p}": bias for p, bias in zip(names.BIAS_POSITIONS, biases, strict=True)}
    # NaN stands for the mean of nothing: no response ended that way.
    return {name: float(value) for name, value in metrics.items() if not value.isnan()}


def mean_of(rows: Sequence[dict[str, float]], maxima: Sequence[str] = ()) -> dict[str, float]:
    """One row out of several updates: means, and the largest of what is a maximum already."""
    if not rows:
        return {}
    return {
        name: max(row[name] for row in rows) if name in maxima else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
