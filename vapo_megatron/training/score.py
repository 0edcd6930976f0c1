"""Scoring a rollout: log-probs of policy and reference policy, and the critic's values, for every response token."""

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
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import policy_metrics, reference_metrics
from vapo_megatron.training.models import Models
from vapo_megatron.training.shards import ShardedBatch, seat

# Responses of which one is scored where engines may stand in for the trainer.
_ONE_OF = 16


def score(
    models: Models,
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and values.

    after_each: called after each model's part; may raise.
    Where the policy's only update gives them (update_gives_logprobs), the first two wait for it, but for a probe.
    """
    if models.reference is not None:
        batch.own.ref_logprobs = of_all(models, models.reference, batch, "score_reference", recorder)[:, 0].contiguous()
    elif models.has_base_as_reference:
        with models.actor.as_base():
            outputs = of_all(models, models.actor, batch, "score_reference", recorder)
        batch.own.ref_logprobs = outputs[:, 0].contiguous()
    after_each()
    states: list[Tensor] | None = [] if isinstance(models.critic, Probe) else None
    spared = states is None and update_gives_logprobs(config, batch)
    if not spared and not engines_agree(models, batch, config, recorder):
        record_policy(batch, of_all(models, models.actor, batch, "score_policy", recorder, states=states), recorder)
        batch.own.hidden_states = states.pop() if states else None
    after_each()
    if models.critic is not None:
        read = partial(values_of, config=config.value_loss)
        batch.own.values = of_all(models, models.critic, batch, "score_values", recorder, read)[:, 0].contiguous()
    after_each()


def engines_agree(models: Models, batch: ShardedBatch, config: AlgorithmConfig, recorder: Recorder) -> bool:
    """Collective: whether the engines' log-probs are near enough to the trainer's (update.rollout_logprobs_within), by
    some of the responses; they are old_logprobs then, and metrics of the policy are of these responses."""
    within = config.update.rollout_logprobs_within
    if within is None:
        return False
    step = max(1, min(_ONE_OF, batch.samples // seat()[1]))
    part = batch.part(models.actor, range(0, batch.samples, step))
    models.memory.enter("score_policy")
    with recorder.phase("score_policy", total=part.whole.samples) as advance:
        outputs = models.actor.score(part.batch, on_done=advance, share=part.share)
    sums = torch.zeros(4, dtype=torch.float64)
    if len(part.reported[seat()[0]]):
        logprobs, entropies = outputs.double().unbind(1)
        rollout = part.batch.rollout_logprobs.double()
        parts = torch.ones_like(rollout), (logprobs - rollout).abs(), k3(rollout, logprobs), entropies
        sums = torch.stack([x.sum() for x in parts])
    tokens, apart, divergence, entropy = batch.summed(sums).tolist()
    agree = bool(apart <= within * tokens)
    recorder.add({names.ROLLOUT_LOGPROBS: float(agree)})
    if agree:
        batch.own.old_logprobs = batch.own.rollout_logprobs.clone()
        recorder.add({names.TRAIN_INFER_KL: divergence / tokens, names.ENTROPY: entropy / tokens})
        if batch.own.ref_logprobs is not None:
            recorder.add(reference_metrics(batch))
    return agree


def of_all(
    models: Models,
    model: Trainable | Probe,
    batch: ShardedBatch,
    phase: Phase,
    recorder: Recorder,
    read: Callable[[Tensor], Tensor] | None = None,
    states: list[Tensor] | None = None,
) -> Tensor:
    """Collective: a model's outputs (Trainable.score) for all samples, and its states, at home: [own T, ...]."""
    models.memory.enter(phase)
    with recorder.phase(phase, total=batch.samples) as advance:
        return score_all(model, batch, advance, read, states)


def score_all(
    model: Trainable | Probe,
    batch: ShardedBatch,
    advance: Callable[[int], None] | None = None,
    read: Callable[[Tensor], Tensor] | None = None,
    states: list[Tensor] | None = None,
) -> Tensor:
    """Collective: what Trainable.score says of all samples, at home: [own T, ...]."""
    part = batch.part(model, range(batch.samples))
    score = model.score if states is None or isinstance(model, Probe) else partial(model.score, states=states)
    outputs = score(part.batch, on_done=advance, read=read, share=part.share)
    if states:
        states[:] = [batch.bring_home(part, states[0])]
    return batch.bring_home(part, outputs)


def update_gives_logprobs(config: AlgorithmConfig, batch: ShardedBatch) -> bool:
    """Whether the update of this rollout computes its old log-probs (AlgorithmConfig.update_gives_logprobs)."""
    return config.update_gives_logprobs(batch.samples, len(batch.table.group_ids.unique()))


def record_policy(batch: ShardedBatch, outputs: Tensor, recorder: Recorder) -> None:
    """Collective: fill old_logprobs and entropies from the policy's outputs [own T, 2], and record their metrics."""
    batch.own.old_logprobs = outputs[:, 0].contiguous()
    batch.own.entropies = outputs[:, 1].contiguous()
    recorder.add(policy_metrics(batch))
    if batch.own.ref_logprobs is not None:
        recorder.add(reference_metrics(batch))


def values(
    critic: Trainable, batch: ExperienceBatch, config: ValueLossConfig, advance: Callable[[int], None] | None = None
) -> Tensor:
    """Collective: the critic's value of the state before every response token of a batch that every rank has whole,
    float32 [T]."""
    return critic.score(batch, on_done=advance, read=partial(values_of, config=config))[:, 0].contiguous()
