"""Scoring a rollout: what policy, reference policy and critic of this step say about every response token."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.algorithm import AlgorithmConfig, ValueLossConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.training.advantages import baselines_of, shaped_rewards
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import policy_metrics, reference_metrics
from vapo_megatron.training.reference import score_reference
from vapo_megatron.training.run import Run


def score(run: Run, batch: ExperienceBatch) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and values [T].

    Where the policy's only update gives them (update_gives_logprobs), the first two wait for it.
    """
    score_reference(run, batch)
    if not update_gives_logprobs(run.config.algorithm, batch):
        run.memory.enter("score_policy")
        with run.recorder.phase("score_policy", total=batch.samples) as advance:
            outputs = run.actor.score(batch, on_done=advance)
        record_policy(run, batch, outputs)
    if run.critic is not None:
        config = run.config.algorithm
        batch.baselines = baselines_of(shaped_rewards(batch, config.shaping), batch.group_ids, config.value_loss)
        run.memory.enter("score_values")
        with run.recorder.phase("score_values", total=batch.samples) as advance:
            batch.values = values(run.critic, batch, config.value_loss, advance)


def update_gives_logprobs(config: AlgorithmConfig, batch: ExperienceBatch) -> bool:
    """Whether the update of this rollout computes its old log-probs (AlgorithmConfig.update_gives_logprobs)."""
    return config.update_gives_logprobs(batch.samples, len(batch.group_ids.unique()))


def record_policy(run: Run, batch: ExperienceBatch, outputs: Tensor) -> None:
    """Fill old_logprobs and entropies [T] from the policy's outputs [T, 2], and put what they tell into the row."""
    batch.old_logprobs = outputs[:, 0].contiguous()
    batch.entropies = outputs[:, 1].contiguous()
    run.recorder.add(policy_metrics(batch))
    if batch.ref_logprobs is not None:
        run.recorder.add(reference_metrics(batch))


def values(
    critic: Trainable, batch: ExperienceBatch, config: ValueLossConfig, advance: Callable[[int], None] | None = None
) -> Tensor:
    """Collective: the critic's value of the state before every response token, float32 [T], baselines included."""
    found = critic.score(batch, on_done=advance, read=partial(values_of, config=config))[:, 0].contiguous()
    return found if batch.baselines is None else found + to_tokens(batch.baselines, batch.response_cu_seqlens)
