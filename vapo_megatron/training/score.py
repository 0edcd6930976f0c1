"""Scoring a rollout: what policy, reference policy and critic of this step say about every response token."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vapo_megatron.config.algorithm import ValueLossConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.training.figures import policy_figures, value_figures
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.reference import score_reference
from vapo_megatron.training.run import Run


def score(run: Run, batch: ExperienceBatch) -> None:
    """Collective: fill old_logprobs, entropies and, where there is such a model, ref_logprobs and values [T]."""
    with run.recorder.phase("score_policy", total=batch.samples) as advance:
        outputs = run.actor.score(batch, on_done=advance)
    batch.token_fields["old_logprobs"] = outputs[:, 0].contiguous()
    batch.token_fields["entropies"] = outputs[:, 1].contiguous()
    run.recorder.add(policy_figures(batch))
    score_reference(run, batch)
    if run.critic is not None:
        with run.recorder.phase("score_values", total=batch.samples) as advance:
            batch.token_fields["values"] = values(run.critic, batch, run.config.algorithm.value_loss, advance)


def values(
    critic: Trainable, batch: ExperienceBatch, config: ValueLossConfig, advance: Callable[[int], None] | None = None
) -> Tensor:
    """Collective: the critic's value of the state before every response token, float32 [T]."""
    return critic.score(batch, on_done=advance, read=partial(values_of, config=config))[:, 0].contiguous()


def record_values(run: Run, batch: ExperienceBatch) -> None:
    """Put the quality of the critic's values into the step's row."""
    if run.critic is not None:
        fields = batch.token_fields
        run.recorder.add(value_figures(fields["values"], fields["returns"], batch.response_cu_seqlens))
