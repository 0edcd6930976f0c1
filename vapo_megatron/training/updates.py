"""The optimizer steps of one iteration: mini-batches of a scored rollout, critic first."""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithms import advantages, importance
from vapo_megatron.algorithms.aggregation import nll_weights, token_weights
from vapo_megatron.algorithms.segments import response_lengths, to_tokens
from vapo_megatron.algorithms.selection import split_minibatches
from vapo_megatron.config.algorithm import AlgorithmConfig, ValueLossConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.metrics import StepResult
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.training.losses import PolicyLoss, ValueLoss
from vapo_megatron.training.metrics import importance_metrics, mean_of
from vapo_megatron.training.run import Run
from vapo_megatron.training.score import record_policy, update_gives_logprobs


def update_critic(run: Run, batch: ExperienceBatch) -> None:
    """Collective: the critic's optimizer steps on a batch; nothing without a critic."""
    if run.critic is None:
        return
    update = run.config.algorithm.update
    rounds = update.epochs * update.critic_updates_per_policy_update
    results = []
    run.memory.enter("update_critic")
    with run.recorder.phase("update_critic", total=batch.samples * rounds) as advance:
        for minibatch in minibatches(run, batch, rounds, salt=1):
            results.append(critic_step(run.critic, minibatch, run.config.algorithm.value_loss))
            advance(minibatch.samples)
    run.recorder.add(update_metrics("critic", results, ()))


def critic_step(critic: Trainable, minibatch: ExperienceBatch, config: ValueLossConfig) -> StepResult:
    """Collective: one optimizer step of the critic on a mini-batch with returns, and old values for a clipped loss."""
    assert minibatch.returns is not None and minibatch.selected is not None, "no value targets: estimate them first"
    bounds, targets, old = minibatch.response_cu_seqlens, minibatch.returns, minibatch.values
    if minibatch.baselines is not None:
        known = to_tokens(minibatch.baselines, bounds)
        targets, old = targets - known, None if old is None else old - known
    check_targets(targets, config)
    weights = token_weights(minibatch.response_lengths, "token_mean", selected=minibatch.selected)
    loss = ValueLoss(config, targets, old, to_tokens(weights, bounds))
    return critic.train_step(minibatch, range(minibatch.samples), loss)


def check_targets(targets: Tensor, config: ValueLossConfig) -> None:
    """Raises BadInput for a value target [T] that no value can reach: a user's function gave a score out of range."""
    if not config.has_bounds:
        return
    low, high = config.support if config.kind == "hl_gauss" else (config.low, config.high)
    beyond = targets[(targets < low - 1e-4) | (targets > high + 1e-4)]
    if beyond.numel():
        raise BadInput(
            f"algorithm.value_loss.low..high={config.low:g}..{config.high:g} does not hold the value target "
            f"{float(beyond[0]):g}: widen it to the range of the rewards"
        )


def update_policy(run: Run, batch: ExperienceBatch) -> None:
    """Collective: the policy's optimizer steps on a batch."""
    results = []
    rounds = run.config.algorithm.update.epochs
    correct_for_rollout(run, batch)
    one_pass = update_gives_logprobs(run.config.algorithm, batch)
    run.memory.enter("update_policy")
    with run.recorder.phase("update_policy", total=batch.samples * rounds) as advance:
        for minibatch in minibatches(run, batch, rounds, salt=2):
            loss = policy_loss(minibatch, run.config.algorithm)
            result = run.actor.train_step(minibatch, range(minibatch.samples), loss, keep_outputs=one_pass)
            if result.outputs is not None:
                record_policy(run, minibatch, result.outputs)
            results.append(result)
            advance(minibatch.samples)
    run.recorder.add(update_metrics("actor", results, PolicyLoss.maxima))


def policy_loss(batch: ExperienceBatch, config: AlgorithmConfig) -> PolicyLoss:
    """The policy's loss on a mini-batch; every denominator counts all of it."""
    lengths, bounds, settings = batch.response_lengths, batch.response_cu_seqlens, config.policy_loss
    chosen, found = batch.selected, batch.advantages
    assert chosen is not None and found is not None, "no advantages: estimate_advantages comes first"
    assert batch.importance_weights is not None, "no importance weights: correct_for_rollout comes first"
    counted = lengths
    if config.importance_sampling.kind == "mis" and config.importance_sampling.rejected == "dropped":
        counted = response_lengths(bounds, batch.importance_weights)
    weights = to_tokens(token_weights(counted, settings.aggregation, settings.constant, chosen), bounds)
    positive_advantages = torch.zeros_like(found)
    if settings.self_imitation_coef:
        assert batch.returns is not None and batch.values is not None, "self-imitation needs returns and values"
        positive_advantages = advantages.self_imitation(batch.returns, batch.values)
    return PolicyLoss(
        config=settings,
        kl=config.kl,
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=torch.zeros_like(found) if batch.ref_logprobs is None else batch.ref_logprobs,
        advantages=found,
        positive_advantages=positive_advantages,
        importance=batch.importance_weights,
        weights=weights,
        nll_weights=to_tokens(nll_weights(lengths, positives(batch, config) & chosen), bounds),
        mean_weights=to_tokens(token_weights(lengths, "token_mean", selected=chosen), bounds),
    )


def correct_for_rollout(run: Run, batch: ExperienceBatch) -> None:
    """Fill importance [T]: what corrects the policy loss for the engine's policy not being the trainer's."""
    settings = run.config.algorithm.importance_sampling
    if settings.kind == "none":
        batch.importance_weights = torch.ones(batch.response_tokens)
        return
    assert batch.old_logprobs is not None, "no log-probs: the batch is not scored"
    log_ratio = importance.log_ratio_at(
        settings.level, batch.old_logprobs, batch.rollout_logprobs, batch.response_cu_seqlens
    )
    if settings.kind == "tis":
        found = importance.tis(log_ratio, settings.cap)
    else:
        found = importance.mis(log_ratio, settings.low, settings.high)
    batch.importance_weights = found
    run.recorder.add(importance_metrics(found, log_ratio))


def positives(batch: ExperienceBatch, config: AlgorithmConfig) -> Tensor:
    """Responses that the language-model loss imitates; a truncated one never is. bool [S]."""
    settings = config.policy_loss.positive_nll
    if settings.positives == "correct":
        return batch.correct & ~batch.truncated
    assert batch.shaped_rewards is not None, "no shaped rewards: estimate_advantages comes first"
    return (batch.shaped_rewards > settings.reward_above) & ~batch.truncated


def minibatches(run: Run, batch: ExperienceBatch, rounds: int, salt: int) -> Iterator[ExperienceBatch]:
    """The mini-batch of each optimizer step, in an order that depends on the run's seed and the step alone."""
    update = run.config.algorithm.update
    for epoch in range(rounds):
        seed = zlib.crc32(f"{run.config.run.seed}/{run.step}/{salt}/{epoch}".encode())
        size = update.size(batch.samples, len(batch.group_ids.unique()))
        for part in split_minibatches(batch.group_ids, size, update.minibatch_unit, seed):
            yield batch.select(part.tolist())


def update_metrics(name: str, results: list[StepResult], maxima: Sequence[str]) -> dict[str, float]:
    """The row of several optimizer steps of one model."""
    metrics = {f"{name}/{key}": value for key, value in mean_of([r.metrics for r in results], maxima).items()}
    metrics[f"{name}/grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics[f"{name}/grad_norm_max"] = max(r.grad_norm for r in results)
    metrics[f"{name}/lr"] = results[-1].lr
    metrics[f"{name}/updates"] = float(len(results))
    return metrics
