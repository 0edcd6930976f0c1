"""Scoring a rollout: log-probs of policy and reference policy, and the critic's values, for every
response token."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vapo_megatron.algorithms.kl import k3
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.offload import Phase
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import policy_metrics, reference_metrics
from vapo_megatron.training.models import Models
from vapo_megatron.training.shards import ShardedBatch


def score(
    models: Models,
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and
    values.

    after_each: called after each model's part; may raise.
    The policy's only update computes the first two itself (update_gives_logprobs), unless a probe
    needs this pass, or values that read entropies.
    """
    local = batch.local
    if models.reference is not None:
        outputs = _score_in_phase(models, models.reference, batch, "score_reference", recorder)
        local.ref_logprobs = outputs[:, 0].contiguous()
    elif models.has_base_as_reference:
        with models.actor.as_base():
            outputs = _score_in_phase(models, models.actor, batch, "score_reference", recorder)
        local.ref_logprobs = outputs[:, 0].contiguous()
    after_each()
    states: list[Tensor] | None = [] if isinstance(models.critic, Probe) else None
    needed = states is not None or models.reads_entropies
    left_to_update = not needed and update_gives_logprobs(config, batch)
    if not left_to_update and not rollout_logprobs_match(models, batch, config, recorder):
        outputs = _score_in_phase(
            models, models.actor, batch, "score_policy", recorder, states=states
        )
        record_policy(batch, outputs, recorder)
        local.hidden_states = states.pop() if states else None
    after_each()
    if models.critic is not None:
        read = partial(values_of, config=config.value_loss)
        outputs = _score_in_phase(models, models.critic, batch, "score_values", recorder, read)
        local.values = outputs[:, 0].contiguous()
    after_each()


def rollout_logprobs_match(
    models: Models, batch: ShardedBatch, config: AlgorithmConfig, recorder: Recorder
) -> bool:
    """Collective: whether the engines' log-probs match the trainer's on a sample of the responses.

    The mean difference may be update.rollout_logprobs_within. They are old_logprobs then, and the
    policy's metrics are computed on the sampled responses.
    """
    limit = config.update.rollout_logprobs_within
    if limit is None:
        return False
    rank, world = rank_and_world()
    step = config.update.scored_of(batch.samples, world)
    model_input = batch.model_input(models.actor, range(0, batch.samples, step))
    models.memory.enter("score_policy")
    with recorder.phase("score_policy", total=model_input.global_table.samples) as advance:
        outputs = models.actor.score(model_input.batch, on_done=advance, share=model_input.share)
    sums = torch.zeros(4, dtype=torch.float64)
    if len(model_input.output_samples[rank]):
        logprobs, entropies = outputs.double().unbind(1)
        rollout = model_input.batch.rollout_logprobs.double()
        columns = (
            torch.ones_like(rollout),
            (logprobs - rollout).abs(),
            k3(rollout, logprobs),
            entropies,
        )
        sums = torch.stack([column.sum() for column in columns])
    tokens, difference, divergence, entropy = batch.sum_over_ranks(sums).tolist()
    match = bool(difference <= limit * tokens)
    recorder.add({names.ROLLOUT_LOGPROBS: float(match)})
    if match:
        batch.local.old_logprobs = batch.local.rollout_logprobs.clone()
        recorder.add({names.TRAIN_INFER_KL: divergence / tokens, names.ENTROPY: entropy / tokens})
        if batch.local.ref_logprobs is not None:
            recorder.add(reference_metrics(batch))
    return match


def _score_in_phase(
    models: Models,
    model: Trainable | Probe,
    batch: ShardedBatch,
    phase: Phase,
    recorder: Recorder,
    read: Callable[[Tensor], Tensor] | None = None,
    states: list[Tensor] | None = None,
) -> Tensor:
    models.memory.enter(phase)
    with recorder.phase(phase, total=batch.samples) as advance:
        return score_samples(model, batch, advance, read, states)


def score_samples(
    model: Trainable | Probe,
    batch: ShardedBatch,
    advance: Callable[[int], None] | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
    states: list[Tensor] | None = None,
) -> Tensor:
    """Collective: a model's outputs (Trainable.score) for all samples, on their owners: [local T,
    ...].

    states: takes the policy's hidden states, on their owners too.
    """
    model_input = batch.model_input(model, range(batch.samples))
    score = model.score
    if states is not None and not isinstance(model, Probe):
        score = partial(model.score, states=states)
    outputs = score(model_input.batch, on_done=advance, read=read, share=model_input.share)
    if states:
        states[:] = [batch.return_to_owner(model_input, states[0])]
    return batch.return_to_owner(model_input, outputs)


def update_gives_logprobs(config: AlgorithmConfig, batch: ShardedBatch) -> bool:
    """Whether the update of this rollout computes its old log-probs
    (AlgorithmConfig.update_gives_logprobs)."""
    return config.update_gives_logprobs(batch.samples, len(batch.table.group_ids.unique()))


def record_policy(batch: ShardedBatch, outputs: Tensor, recorder: Recorder) -> None:
    """Collective: fill old_logprobs and entropies from the policy's outputs [local T, 2], and
    record their metrics."""
    batch.local.old_logprobs = outputs[:, 0].contiguous()
    batch.local.entropies = outputs[:, 1].contiguous()
    recorder.add(policy_metrics(batch))
    if batch.local.ref_logprobs is not None:
        recorder.add(reference_metrics(batch))


def values(
    critic: Trainable,
    batch: ExperienceBatch,
    config: ValueLossConfig,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Collective: the critic's value of the state before every response token of a batch that every
    rank has whole, float32 [T]."""
    return critic.score(batch, on_done=advance, read=partial(values_of, config=config))[
        :, 0
    ].contiguous()
