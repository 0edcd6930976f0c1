"""Scoring a rollout: what policy, reference policy and critic of this step say about every response token."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.offload import Phase
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import policy_metrics, reference_metrics
from vapo_megatron.training.models import Models
from vapo_megatron.training.shards import ShardedBatch


def score(models: Models, batch: ShardedBatch, config: AlgorithmConfig, recorder: Recorder) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and values.

    Where the policy's only update gives them (update_gives_logprobs), the first two wait for it, but for a probe.
    """
    if models.reference is not None:
        batch.own.ref_logprobs = of_all(models, models.reference, batch, "score_reference", recorder)[:, 0].contiguous()
    elif models.has_base_as_reference:
        with models.actor.as_base():
            outputs = of_all(models, models.actor, batch, "score_reference", recorder)
        batch.own.ref_logprobs = outputs[:, 0].contiguous()
    states: list[Tensor] | None = [] if isinstance(models.critic, Probe) else None
    spared = states is None and update_gives_logprobs(config, batch)
    if not spared:
        record_policy(batch, of_all(models, models.actor, batch, "score_policy", recorder, states=states), recorder)
        batch.own.hidden_states = states.pop() if states else None
    if models.critic is not None:
        read = partial(values_of, config=config.value_loss)
        batch.own.values = of_all(models, models.critic, batch, "score_values", recorder, read)[:, 0].contiguous()


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
