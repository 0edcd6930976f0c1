"""The optimizer updates of one step: mini-batches of a scored rollout, critic first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vapo_megatron.algorithms import importance
from vapo_megatron.algorithms.aggregation import nll_weights, token_weights
from vapo_megatron.algorithms.critic_faults import loss_counts, loss_faults, target_faults
from vapo_megatron.algorithms.segments import response_lengths, to_tokens
from vapo_megatron.algorithms.selection import minibatch_seed, positive_responses, split_minibatches
from vapo_megatron.config.algorithm import AlgorithmConfig, UpdateConfig
from vapo_megatron.config.policy import ImportanceSamplingConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.token_loss import StepResult, largest_over_ranks, sum_over_ranks
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import gae, new_tokens, teaches_critic, token_rewards
from vapo_megatron.training.losses import PolicyLoss, ValueLoss, values_of
from vapo_megatron.training.metrics import importance_metrics, mean_of
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import record_policy
from vapo_megatron.training.shards import Part, ShardedBatch, seat
from vapo_megatron.training.skipped_updates import UNFINISHED

# How far values may be apart that one critic gives one batch twice, cut into other micro-batches; times their size.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


# Fields of the first mini-batch that first_update_faults reads besides values and returns, if they are filled in.
RECOMPUTED = ("old_logprobs", "ref_logprobs")


def first_update_faults(
    critic: Trainable | Probe, part: Part, loss: ValueLoss, result: StepResult, config: AlgorithmConfig
) -> list[str]:
    """Collective: what the first optimizer step on a rollout gives away, which the critic has just made on this part of
    the mini-batch. The part has the values that the rollout was scored with, the result the critic's outputs before."""
    batch = part.batch
    assert batch.selected is not None and batch.returns is not None and batch.values is not None
    counts = loss_counts(loss.weights, teaches_critic(batch, config.shaping), batch.response_cu_seqlens)
    faults = loss_faults(sum_over_ranks(counts))  # of each sample as often as of any other: shares are those of one
    again = replace(batch)
    gae(again, token_rewards(again, config), config, again.response_lengths)
    assert again.returns is not None
    recorded = loss.old_values
    assert recorded is not None, "values are sent with a mini-batch"
    here = [
        float(bool(target_faults(batch.returns, again.returns))),
        float(recorded.abs().max()) if len(recorded) else 0.0,
    ]
    remade, largest = largest_over_ranks(*here)
    remade = 0.0 if config.advantage.function is not None else remade  # value targets may be the user's own
    if not remade and result.outputs is not None:
        differs = len(part.reported[seat()[0]]) and target_faults(
            values_of(result.outputs, config.value_loss), recorded, _tolerance(critic, largest)
        )
        (remade,) = largest_over_ranks(float(bool(differs)))
    faults += ["targets"] if remade else []
    if result.metrics["value_loss"] > 1e-12 and not critic.head_has_gradient():
        faults.append("frozen")
    return faults


def _tolerance(critic: Trainable | Probe, largest: float) -> float:
    rounding = _ROUNDING[critic.dtype] if critic.config.precision.fp8 == "none" else 2 * _ROUNDING[torch.bfloat16]
    return rounding * max(1.0, largest)


def update_critic(
    models: Models, batch: ShardedBatch, config: AlgorithmConfig, step_seed: str, recorder: Recorder
) -> None:
    """Collective: the critic's optimizer steps on a batch; none without a critic, or where nothing teaches it."""
    if models.critic is None:
        return
    carries, learnt = batch.table.selected, teaches_critic(batch.table, config.shaping)
    assert carries is not None, "nothing is selected: estimate_advantages comes first"
    if not models.updates.has_signal(carries, learnt, UNFINISHED):
        return
    rounds = config.update.epochs * config.update.critic_updates_per_policy_update
    results: list[StepResult] = []
    models.memory.enter("update_critic")
    with recorder.phase("update_critic", total=batch.samples * rounds) as advance:
        for samples in minibatches(batch, config.update, rounds, step_seed, salt=1):
            if models.updates.has_signal(carries[samples], learnt[samples], UNFINISHED):
                first = not results
                part = batch.part(models.critic, samples, "values", "returns", *(RECOMPUTED if first else ()))
                loss = value_loss_of(part, config.value_loss, teaches_critic(part.whole, config.shaping))
                # To be compared with the recorded values; the bins of a histogram would be many times as much.
                keep = first and config.value_loss.outputs == 1
                result = models.critic.train_step(part.batch, part.share, loss, keep_outputs=keep)
                if first:
                    faults = first_update_faults(models.critic, part, loss, result, config)
                    recorder.add({f"{names.CRITIC_FAULT}{fault}": 1.0 for fault in faults})
                results.append(result)
            advance(len(samples))
    batch.own.hidden_states = None
    recorder.add(update_metrics("critic", results, ()))


def critic_step(critic: Trainable, minibatch: ShardedBatch, config: ValueLossConfig) -> StepResult:
    """Collective: one optimizer step of the critic on a mini-batch with returns; not for a clipped loss."""
    part = minibatch.part(critic, range(minibatch.samples), "returns")
    return critic.train_step(part.batch, part.share, value_loss_of(part, config))


def value_loss_of(part: Part, config: ValueLossConfig, learnt: Tensor | None = None) -> ValueLoss:
    """The critic's loss on a mini-batch; the denominator counts the responses learnt from, bool [S]: None is all."""
    batch, whole = part.batch, part.whole
    assert batch.returns is not None and whole.selected is not None, "no value targets: estimate them first"
    bounds, targets, old = batch.response_cu_seqlens, batch.returns, batch.values
    weights = token_weights(whole.response_lengths, "token_mean", selected=whole.selected if learnt is None else learnt)
    my_weights = to_tokens(weights[part.mine], bounds)
    check_targets(targets[my_weights > 0], config)
    return ValueLoss(config, targets, old, my_weights)


def check_targets(targets: Tensor, config: ValueLossConfig) -> None:
    """Raises BadInput for a value target that is learnt and that no value can reach: a user's function gave a score out
    of range."""
    if not config.has_bounds:
        return
    low, high = config.support if config.kind == "hl_gauss" else (config.low, config.high)
    beyond = targets[(targets < low - 1e-4) | (targets > high + 1e-4)]
    if beyond.numel():
        raise BadInput(
            f"algorithm.value_loss.low..high={config.low:g}..{config.high:g} does not contain the value target "
            f"{float(beyond[0]):g}: widen it to the range of the rewards"
        )


def update_policy(
    models: Models, batch: ShardedBatch, config: AlgorithmConfig, step_seed: str, recorder: Recorder
) -> None:
    """Collective: the policy's optimizer steps on a batch; none where nothing teaches it."""
    correct_for_rollout(batch, config.importance_sampling, recorder)
    carries, signal = policy_signal(batch, config)
    if not models.updates.has_signal(carries, signal):
        return
    results = []
    rounds = config.update.epochs
    one_pass = batch.own.old_logprobs is None  # update_gives_logprobs
    needed = ["old_logprobs", "ref_logprobs", "advantages", "importance_weights"]
    needed += ["values"] if config.policy_loss.function is not None else []
    models.memory.enter("update_policy")
    with recorder.phase("update_policy", total=batch.samples * rounds) as advance:
        for samples in minibatches(batch, config.update, rounds, step_seed, salt=2):
            if models.updates.has_signal(carries[samples], signal[samples]):
                part = batch.part(models.actor, samples, *needed)
                loss = policy_loss(part, config)
                result = models.actor.train_step(part.batch, part.share, loss, keep_outputs=one_pass)
                if result.outputs is not None:
                    record_policy(batch, batch.bring_home(part, result.outputs), recorder)
                results.append(result)
            advance(len(samples))
    recorder.add(update_metrics("actor", results, PolicyLoss.maxima))


def policy_signal(batch: ShardedBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Collective: which samples carry the policy's loss, and for which of them it has a gradient: two bool [S]."""
    home, table, settings = batch.own, batch.table, config.policy_loss
    assert home.advantages is not None and table.selected is not None, "no advantages: estimate_advantages comes first"
    assert home.importance_weights is not None, "no importance weights: correct_for_rollout comes first"
    always = settings.entropy_coef or settings.kind == "function"
    if always or config.kl.placement == "loss":
        return table.selected, table.selected
    weighted = table.selected & (table.new_lengths > 0)
    imitated = torch.zeros_like(weighted)
    if settings.positive_nll.coef:
        imitated = table.selected & positive_responses(table.correct, table.truncated)
    new, moved = new_tokens(home), (home.advantages * home.importance_weights) != 0
    moves = response_lengths(home.response_cu_seqlens, moved if new is None else moved & new)
    return weighted | imitated, (weighted & (batch.everywhere(moves) > 0)) | imitated


def policy_loss(part: Part, config: AlgorithmConfig) -> PolicyLoss:
    """The policy's loss on a mini-batch; every denominator counts all of it."""
    batch, whole, settings = part.batch, part.whole, config.policy_loss
    lengths, chosen, advantages, new = whole.new_lengths, whole.selected, batch.advantages, new_tokens(batch)
    assert chosen is not None and advantages is not None, "no advantages: estimate_advantages comes first"
    assert batch.importance_weights is not None, "no importance weights: correct_for_rollout comes first"
    weights = token_weights(lengths, settings.aggregation, settings.constant, chosen)

    def over_tokens(weights: Tensor) -> Tensor:
        spread = to_tokens(weights[part.mine], batch.response_cu_seqlens)
        return spread if new is None else spread * new

    return PolicyLoss(
        config=settings,
        kl=config.kl,
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=torch.zeros_like(advantages) if batch.ref_logprobs is None else batch.ref_logprobs,
        advantages=advantages,
        importance=batch.importance_weights,
        weights=over_tokens(weights),
        nll_weights=over_tokens(nll_weights(lengths, positive_responses(whole.correct, whole.truncated) & chosen)),
        mean_weights=over_tokens(token_weights(lengths, "token_mean", selected=chosen)),
        values=batch.values,
    )


def correct_for_rollout(batch: ShardedBatch, config: ImportanceSamplingConfig, recorder: Recorder) -> None:
    """Collective: fill importance_weights, what corrects the policy loss for the engine's policy not being the
    trainer's."""
    home = batch.own
    if config.kind == "none":
        home.importance_weights = torch.ones(home.response_tokens)
        return
    assert home.old_logprobs is not None, "no log-probs: the batch is not scored"
    log_ratio = home.old_logprobs - home.rollout_logprobs
    if config.kind == "tis":
        home.importance_weights = importance.tis(log_ratio, config.cap)
    else:
        home.importance_weights = importance.mis(log_ratio, config.low, config.high)
    recorder.add(importance_metrics(batch, home.importance_weights, log_ratio))


def minibatches(
    batch: ShardedBatch, config: UpdateConfig, rounds: int, step_seed: str, salt: int
) -> Iterator[list[int]]:
    """The samples of each optimizer step, in an order that depends on the run's seed and the step alone."""
    group_ids = batch.table.group_ids
    for epoch in range(rounds):
        seed = minibatch_seed(step_seed, salt, epoch)
        size = config.size(batch.samples, len(group_ids.unique()))
        for part in split_minibatches(group_ids, size, config.minibatch_unit, seed):
            yield part.tolist()


def update_metrics(name: str, results: list[StepResult], maxima: Sequence[str]) -> dict[str, float]:
    """The row of several optimizer steps of one model; of those that were made."""
    results = [result for result in results if result.updated]
    if not results:
        return {f"{name}/updates": 0.0}
    metrics = {f"{name}/{key}": value for key, value in mean_of([r.metrics for r in results], maxima).items()}
    metrics[f"{name}/grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics[f"{name}/grad_norm_max"] = max(r.grad_norm for r in results)
    metrics[f"{name}/lr"] = results[-1].lr
    metrics[f"{name}/updates"] = float(len(results))
    return metrics
