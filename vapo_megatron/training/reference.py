"""The reference policy: what the KL penalty keeps the policy near to."""

from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.training.run import Run


def score_reference(run: Run, batch: ExperienceBatch) -> None:
    """Collective: fill ref_logprobs [T] of a batch; nothing without a reference."""
    if run.reference is None:
        return
    run.memory.enter("score_reference")
    with run.recorder.phase("score_reference", total=batch.samples) as advance:
        outputs = run.reference.score(batch, on_done=advance)
    batch.ref_logprobs = outputs[:, 0].contiguous()


def replace_reference(run: Run) -> None:
    """The policy of every kl.replace_reference_every-th step becomes the reference (DeepSeek-R1, arXiv 2501.12948)."""
    every = run.config.algorithm.kl.replace_reference_every
    if run.reference is not None and every is not None and run.step % every == 0:
        run.memory.enter("replace_reference")
        run.reference.copy_from(run.actor)
