"""Scoring a rollout: what policy, reference policy and critic of this step say about every response token."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import baselines_of, shaped_rewards
from vapo_megatron.training.broadcast import share_fields
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import policy_metrics, reference_metrics
from vapo_megatron.training.models import Models
from vapo_megatron.training.reference import score_reference


def score(models: Models, batch: ExperienceBatch, config: AlgorithmConfig, recorder: Recorder) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and values [T].

    Where the policy's only update gives them (update_gives_logprobs), the first two wait for it.
    """
    score_reference(models, batch, recorder)
    if not update_gives_logprobs(config, batch):
        models.memory.enter("score_policy")
        with recorder.phase("score_policy", total=batch.samples) as advance:
            outputs = models.actor.score(batch, on_done=advance)
        record_policy(batch, outputs, recorder)
    if models.critic is not None:
        batch.baselines = baselines_of(shaped_rewards(batch, config.shaping), batch.group_ids, config.value_loss)
        models.memory.enter("score_values")
        with recorder.phase("score_values", total=batch.samples) as advance:
            batch.values = values(models.critic, batch, config.value_loss, advance)
    share_fields(batch, "ref_logprobs", "old_logprobs", "entropies", "values")


def update_gives_logprobs(config: AlgorithmConfig, batch: ExperienceBatch) -> bool:
    """Whether the update of this rollout computes its old log-probs (AlgorithmConfig.update_gives_logprobs)."""
    return config.update_gives_logprobs(batch.samples, len(batch.group_ids.unique()))


def record_policy(batch: ExperienceBatch, outputs: Tensor, recorder: Recorder) -> None:
    """Fill old_logprobs and entropies [T] from the policy's outputs [T, 2], and record their metrics."""
    batch.old_logprobs = outputs[:, 0].contiguous()
    batch.entropies = outputs[:, 1].contiguous()
    recorder.add(policy_metrics(batch))
    if batch.ref_logprobs is not None:
        recorder.add(reference_metrics(batch))


def values(
    critic: Trainable, batch: ExperienceBatch, config: ValueLossConfig, advance: Callable[[int], None] | None = None
) -> Tensor:
    """Collective: the critic's value of the state before every response token, float32 [T], baselines included."""
    found = critic.score(batch, on_done=advance, read=partial(values_of, config=config))[:, 0].contiguous()
    return found if batch.baselines is None else found + to_tokens(batch.baselines, batch.response_cu_seqlens)
