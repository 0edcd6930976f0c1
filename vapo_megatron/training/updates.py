"""The optimizer updates of one step: mini-batches of a scored rollout, critic first."""

from collections.abc import Iterator, Sequence

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
from vapo_megatron.training.advantages import gae
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.losses import PolicyLoss, ValueLoss, values_of
from vapo_megatron.training.metrics import importance_metrics, mean_of
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import record_policy
from vapo_megatron.training.shards import ModelInput, ShardedBatch
from vapo_megatron.training.skipped_updates import UNFINISHED
from vapo_megatron.training.token_rewards import new_tokens, teaches_critic, token_rewards

# Largest relative difference of values that one critic gives one batch in two cuts into
# micro-batches.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Largest difference of targets that are computed again, beside the rounding of float32 sums as a
# share of the largest number in them.
_TARGETS_DIFFER = 1e-3
_TARGET_ROUNDING = 1e-5


def update_critic(
    models: Models, batch: ShardedBatch, config: AlgorithmConfig, step_seed: str, recorder: Recorder
) -> None:
    """Collective: the critic's optimizer steps on a batch; none without a critic, or where nothing
    teaches it."""
    if models.critic is None:
        return
    carries = batch.table.selected
    learnt = teaches_critic(batch.table, config.shaping)
    assert carries is not None, "nothing is selected: estimate_advantages comes first"
    if not models.updates.has_signal(carries, learnt, UNFINISHED):
        return
    rounds = config.update.epochs * config.update.critic_updates_per_policy_update
    results: list[StepResult] = []
    models.memory.enter("update_critic")
    with recorder.phase("update_critic", total=batch.samples * rounds) as advance:
        for samples in minibatches(batch, config.update, rounds, step_seed, salt=1):
            if models.updates.has_signal(carries[samples], learnt[samples], UNFINISHED):
                is_first = not results
                result = _critic_update(models.critic, batch, samples, config, recorder, is_first)
                results.append(result)
            advance(len(samples))
    batch.local.hidden_states = None
    recorder.add(update_metrics("critic", results, ()))


def _critic_update(
    critic: Trainable | Probe,
    batch: ShardedBatch,
    samples: list[int],
    config: AlgorithmConfig,
    recorder: Recorder,
    is_first: bool,
) -> StepResult:
    """is_first: the rollout's first update, which is checked for wiring faults."""
    model_input = batch.model_input(critic, samples, "values", "returns")
    learnt = teaches_critic(model_input.global_table, config.shaping)
    loss = value_loss_of(model_input, config.value_loss, learnt)
    # Outputs are compared with the recorded values; a histogram's bins would take many times the
    # memory.
    keep_outputs = is_first and config.value_loss.outputs == 1
    result = critic.train_step(
        model_input.batch, model_input.share, loss, keep_outputs=keep_outputs
    )
    if is_first:
        faults = first_update_faults(critic, batch, model_input, loss, result, config)
        recorder.add({f"{names.CRITIC_FAULT}{fault}": 1.0 for fault in faults})
    return result


def first_update_faults(
    critic: Trainable | Probe,
    batch: ShardedBatch,
    model_input: ModelInput,
    loss: ValueLoss,
    result: StepResult,
    config: AlgorithmConfig,
) -> list[str]:
    """Collective: checks the critic's first optimizer step on a rollout for wiring faults; names of
    those found.

    The loss has the values that the rollout was scored with, the result the critic's outputs
    before the step. Both return to the owners of the samples, who have them whole.
    """
    rank, _ = rank_and_world()
    assert loss.old_values is not None, "values are sent with a mini-batch"
    columns = torch.stack((loss.weights, loss.targets, loss.old_values, loss.old_values), 1)
    if result.outputs is not None and len(model_input.output_samples[rank]):
        columns[:, 3] = values_of(result.outputs, config.value_loss)
    weights, targets, recorded, outputs = batch.return_to_owner(model_input, columns).unbind(1)
    recomputed = batch.owned_samples(model_input)
    learnt = teaches_critic(recomputed, config.shaping)
    faults = loss_faults(
        sum_over_ranks(loss_counts(weights, learnt, recomputed.response_cu_seqlens))
    )

    recomputed.values = recorded
    rewards = token_rewards(recomputed, config)
    gae(recomputed, rewards, config, recomputed.response_lengths)
    assert recomputed.returns is not None
    if len(recorded):
        largest = float(recorded.abs().max())
        largest_target = float(targets.abs().max())
    else:
        largest = largest_target = 0.0
    allowed = _TARGETS_DIFFER + _TARGET_ROUNDING * max(largest, largest_target)
    targets_differ = float(bool(target_faults(targets, recomputed.returns, allowed)))
    targets_differ, largest = largest_over_ranks(targets_differ, largest)
    if config.advantage.function is not None:
        targets_differ = 0.0  # value targets may be the user's own
    if not targets_differ and result.outputs is not None:
        values_differ = bool(target_faults(outputs, recorded, _tolerance(critic, largest)))
        (targets_differ,) = largest_over_ranks(float(values_differ))
    if targets_differ:
        faults.append("targets")
    if result.metrics["value_loss"] > 1e-12 and not critic.head_has_gradient():
        faults.append("frozen")
    return faults


def _tolerance(critic: Trainable | Probe, largest: float) -> float:
    rounding = _ROUNDING[critic.dtype]
    if critic.config.precision.fp8 != "none":
        rounding = 2 * _ROUNDING[torch.bfloat16]
    return rounding * max(1.0, largest)


def critic_step(critic: Trainable, minibatch: ShardedBatch, config: ValueLossConfig) -> StepResult:
    """Collective: one optimizer step of the critic on a mini-batch with returns; not for a clipped
    loss."""
    model_input = minibatch.model_input(critic, range(minibatch.samples), "returns")
    loss = value_loss_of(model_input, config)
    return critic.train_step(model_input.batch, model_input.share, loss)


def value_loss_of(
    model_input: ModelInput, config: ValueLossConfig, learnt: Tensor | None = None
) -> ValueLoss:
    """The critic's loss on a mini-batch; its denominator counts the responses learnt from, bool
    [S]; None: all."""
    batch = model_input.batch
    table = model_input.global_table
    assert batch.returns is not None and table.selected is not None, (
        "no value targets: estimate them first"
    )
    if learnt is None:
        counted = table.selected
    else:
        counted = learnt
    weights = token_weights(table.response_lengths, "token_mean", selected=counted)
    local_weights = to_tokens(weights[model_input.local_indices], batch.response_cu_seqlens)
    check_targets(batch.returns[local_weights > 0], config)
    return ValueLoss(config, batch.returns, batch.values, local_weights)


def check_targets(targets: Tensor, config: ValueLossConfig) -> None:
    """Raises BadInput for a value target that is learnt and that no value can reach: a user's
    function gave a score out of range."""
    if not config.has_bounds:
        return
    low, high = config.support if config.kind == "hl_gauss" else (config.low, config.high)
    beyond = targets[(targets < low - 1e-4) | (targets > high + 1e-4)]
    if beyond.numel():
        raise BadInput(
            f"algorithm.value_loss.low..high={config.low:g}..{config.high:g} does not contain the "
            f"value target {float(beyond[0]):g}: widen it to the range of the rewards"
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
    computes_old_logprobs = batch.local.old_logprobs is None  # update_gives_logprobs
    needed = ["old_logprobs", "ref_logprobs", "advantages", "importance_weights"]
    if config.policy_loss.function is not None:
        needed.append("values")
    models.memory.enter("update_policy")
    with recorder.phase("update_policy", total=batch.samples * rounds) as advance:
        for samples in minibatches(batch, config.update, rounds, step_seed, salt=2):
            if models.updates.has_signal(carries[samples], signal[samples]):
                model_input = batch.model_input(models.actor, samples, *needed)
                result = models.actor.train_step(
                    model_input.batch,
                    model_input.share,
                    policy_loss(model_input, config),
                    keep_outputs=computes_old_logprobs,
                )
                if result.outputs is not None:
                    outputs = batch.return_to_owner(model_input, result.outputs)
                    record_policy(batch, outputs, recorder)
                results.append(result)
            advance(len(samples))
    recorder.add(update_metrics("actor", results, PolicyLoss.maxima))


def policy_signal(batch: ShardedBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Collective: which samples carry the policy's loss, and for which of them it has a gradient:
    two bool [S]."""
    local = batch.local
    table = batch.table
    settings = config.policy_loss
    selected = table.selected
    assert local.advantages is not None and selected is not None, (
        "no advantages: estimate_advantages comes first"
    )
    assert local.importance_weights is not None, (
        "no importance weights: correct_for_rollout comes first"
    )
    always = settings.entropy_coef or settings.kind == "function"
    if always or config.kl.placement == "loss":
        return selected, selected
    weighted = selected & (table.new_lengths > 0)
    imitated = torch.zeros_like(weighted)
    if settings.positive_nll.coef:
        imitated = selected & positive_responses(table.correct, table.truncated)
    moved = (local.advantages * local.importance_weights) != 0
    new = new_tokens(local)
    if new is not None:
        moved = moved & new
    moved_tokens = batch.gather_samples(response_lengths(local.response_cu_seqlens, moved))
    return weighted | imitated, (weighted & (moved_tokens > 0)) | imitated


def policy_loss(model_input: ModelInput, config: AlgorithmConfig) -> PolicyLoss:
    """The policy's loss on a mini-batch; every denominator counts all of it."""
    batch = model_input.batch
    table = model_input.global_table
    settings = config.policy_loss
    selected = table.selected
    advantages = batch.advantages
    assert selected is not None and advantages is not None, (
        "no advantages: estimate_advantages comes first"
    )
    assert batch.importance_weights is not None, (
        "no importance weights: correct_for_rollout comes first"
    )
    lengths = table.new_lengths
    new = new_tokens(batch)

    def over_tokens(weights: Tensor) -> Tensor:
        by_token = to_tokens(weights[model_input.local_indices], batch.response_cu_seqlens)
        if new is None:
            return by_token
        return by_token * new

    positive = positive_responses(table.correct, table.truncated) & selected
    reference = batch.ref_logprobs
    return PolicyLoss(
        config=settings,
        kl=config.kl,
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=torch.zeros_like(advantages) if reference is None else reference,
        advantages=advantages,
        importance=batch.importance_weights,
        weights=over_tokens(
            token_weights(lengths, settings.aggregation, settings.constant, selected)
        ),
        nll_weights=over_tokens(nll_weights(lengths, positive)),
        mean_weights=over_tokens(token_weights(lengths, "token_mean", selected=selected)),
        values=batch.values,
    )


def correct_for_rollout(
    batch: ShardedBatch, config: ImportanceSamplingConfig, recorder: Recorder
) -> None:
    """Collective: fill importance_weights, which correct the policy loss for the difference between
    the engine's policy and the trainer's."""
    local = batch.local
    if config.kind == "none":
        local.importance_weights = torch.ones(local.response_tokens)
        return
    assert local.old_logprobs is not None, "no log-probs: the batch is not scored"
    log_ratio = local.old_logprobs - local.rollout_logprobs
    if config.kind == "tis":
        local.importance_weights = importance.tis(log_ratio, config.cap)
    else:
        local.importance_weights = importance.mis(log_ratio, config.low, config.high)
    recorder.add(importance_metrics(batch, local.importance_weights, log_ratio))


def minibatches(
    batch: ShardedBatch, config: UpdateConfig, rounds: int, step_seed: str, salt: int
) -> Iterator[list[int]]:
    """The samples of each optimizer step, in an order that depends on the run's seed and the step
    alone."""
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
    metrics = {
        f"{name}/{key}": value
        for key, value in mean_of([r.metrics for r in results], maxima).items()
    }
    metrics[f"{name}/grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics[f"{name}/grad_norm_max"] = max(r.grad_norm for r in results)
    metrics[f"{name}/lr"] = results[-1].lr
    metrics[f"{name}/updates"] = float(len(results))
    return metrics
