"""The reference policy: what the KL penalty keeps the policy near to."""

from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.training.figures import reference_figures
from vapo_megatron.training.run import Run


def score_reference(run: Run, batch: ExperienceBatch) -> None:
    """Collective: fill ref_logprobs [T] of a batch that has old_logprobs; nothing without a reference."""
    if run.reference is None:
        return
    run.reference.wake()
    with run.recorder.phase("score_reference", total=batch.samples) as advance:
        outputs = run.reference.score(batch, on_done=advance)
    run.reference.sleep()
    batch.token_fields["ref_logprobs"] = outputs[:, 0].contiguous()
    run.recorder.add(reference_figures(batch))


def replace_reference(run: Run) -> None:
    """The policy of every kl.replace_reference_every-th step becomes the reference (DeepSeek-R1, arXiv 2501.12948)."""
    every = run.config.algorithm.kl.replace_reference_every
    if run.reference is not None and every is not None and run.step % every == 0:
        run.reference.copy_from(run.actor)
