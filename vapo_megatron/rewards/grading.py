"""Verdicts on samples."""

from collections.abc import Callable, Sequence

from vapo_megatron.experience.sample import Sample
from vapo_megatron.rewards.pool import Case, VerifierPool


def grade_samples(
    samples: Sequence[Sample],
    verifier: VerifierPool,
    decode: Callable[[Sequence[int]], str],
    incorrect: float,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill text, reward, correct, verdict and extracted of every sample.

    A truncated response is not verified: it counts as incorrect, whatever it may have said on its way.

    Args:
        samples: to fill, in place.
        verifier: what decides.
        decode: from token ids to text.
        incorrect: the reward of a truncated response.
        advance: is told of each graded sample.
    """
    for sample in samples:
        sample.text = decode(sample.response_ids)
        sample.reward, sample.correct, sample.verdict = incorrect, False, "truncated"
    finished = [sample for sample in samples if not sample.truncated]
    advance(len(samples) - len(finished))
    cases = [Case(s.prompt.answer, s.text, problem=s.prompt.problem) for s in finished]
    verdicts = verifier.grade_batch(cases, on_done=lambda *_: advance(1))
    for sample, verdict in zip(finished, verdicts, strict=True):
        sample.reward, sample.correct, sample.verdict = verdict.score, verdict.correct, verdict.reason
        sample.extracted = verdict.extracted
