"""Scoring a rollout: what the policy and the critic of this step say about every response token."""

from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.training.figures import policy_figures, value_figures
from vapo_megatron.training.run import Run


def score(run: Run, batch: ExperienceBatch) -> None:
    """Collective: fill old_logprobs, entropies and values [T] of a batch."""
    with run.recorder.phase("score_policy", total=batch.samples) as advance:
        outputs = run.actor.score(batch, on_done=advance)
    batch.token_fields["old_logprobs"] = outputs[:, 0].contiguous()
    batch.token_fields["entropies"] = outputs[:, 1].contiguous()
    run.recorder.add(policy_figures(batch))
    if run.critic is not None:
        with run.recorder.phase("score_values", total=batch.samples) as advance:
            batch.token_fields["values"] = run.critic.score(batch, on_done=advance)[:, 0].contiguous()


def record_values(run: Run, batch: ExperienceBatch) -> None:
    """Put the quality of the critic's values into the step's row."""
    if run.critic is not None:
        fields = batch.token_fields
        run.recorder.add(value_figures(fields["values"], fields["returns"], batch.response_cu_seqlens))
