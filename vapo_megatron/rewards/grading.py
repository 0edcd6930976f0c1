"""Grades samples."""

from collections.abc import Callable, Sequence

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.sample import GRADED_BY_AGENT, Prompt, Sample
from vapo_megatron.rewards.extract import final_part
from vapo_megatron.rewards.grade import FAILED, Case, Grade
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rewards.work_left import is_copied

# The grade on a response that was cut: nothing was verified.
TRUNCATED = "truncated"
# So many failures, and no success, are the verifier's fault, however many responses were truncated.
_ENOUGH_FAILURES = 4


def grade_samples(
    samples: Sequence[Sample],
    verifier: VerifierPool,
    decode: Callable[[Sequence[int]], str],
    config: RewardConfig,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill text, reward, correct, grade and extracted of every sample.

    A truncated response is not verified, unless reward.grade_truncated is set for a user's
    function: it counts as incorrect, whatever it says. A response that continues in a later step is
        never verified.

    decode: from token ids to text; advance: gets 1 for each graded sample.
    """
    for sample in samples:
        sample.text = decode(sample.response_ids.tolist())
    samples = [sample for sample in samples if not graded_by_its_agent(sample, config)]
    if not samples:
        return
    answers = [s.text if s.loss_mask is None else decode(s.last_turn.tolist()) for s in samples]
    cases = [
        None if s.goes_on else case_of(s.prompt, answer, s.truncated, config)
        for s, answer in zip(samples, answers, strict=True)
    ]
    for sample, grade in zip(samples, _grades(cases, verifier, advance), strict=True):
        if grade is None:
            worth = config.changed(sample.prompt.reward).incorrect
            sample.reward = worth
            sample.correct = False
            sample.grade_reason = TRUNCATED
        else:
            sample.reward = grade.score
            sample.correct = grade.correct
            sample.grade_reason = grade.reason
            sample.extracted = grade.extracted
        if sample.turn_rewards is not None:
            sample.reward += float(sample.turn_rewards.sum())
        if sample.correct:
            answer = sample.extracted or final_part(sample.text).strip()
            sample.copied = is_copied(sample.prompt.problem, answer, sample.prompt.answer)


def copied_share(samples: Sequence[Sample]) -> float:
    """The share of correct samples that restate the problem; 0 where none is correct."""
    correct = sum(bool(sample.correct) for sample in samples)
    return sum(sample.copied for sample in samples) / max(correct, 1)


def graded_by_its_agent(sample: Sample, config: RewardConfig) -> bool:
    """Whether the sample needs no verifier: its agent gave a reward, or its episode broke and
    counts as incorrect."""
    config = config.changed(sample.prompt.reward)
    if not len(sample.response_ids):
        sample.reward = config.incorrect
        sample.correct = False
        return True
    if sample.episode is None or sample.reward is None:
        return False
    if sample.correct is None:
        sample.correct = config.correct_above is not None and sample.reward > config.correct_above
    sample.grade_reason = sample.grade_reason or GRADED_BY_AGENT[0]
    return True


def failed_share(samples: Sequence[Sample], verifier: VerifierPool) -> float:
    """The share of graded samples whose verification failed.

    Raises:
        BadInput: as grades_of.
    """
    _refuse_if_all_failed(
        [s.grade_reason for s in samples if s.grade_reason != TRUNCATED], len(samples), verifier
    )
    return sum(sample.grade_reason in FAILED for sample in samples) / max(len(samples), 1)


def case_of(prompt: Prompt, text: str, truncated: bool, config: RewardConfig) -> Case | None:
    """The verifier's input; None for a truncated response that is not to be verified."""
    config = config.changed(prompt.reward)
    if truncated and not config.grade_truncated:
        return None
    extra = {**prompt.extra, "truncated": truncated} if config.grade_truncated else prompt.extra
    return Case(prompt.answer, text, prompt.problem, extra, prompt.reward)


def grades_of(
    cases: Sequence[Case | None],
    verifier: VerifierPool,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Grade | None]:
    """The grade on each case; None stands for a truncated response, here as there.

    advance gets 1 for each case that is done.

    Raises:
        BadInput: a user's function failed on all of them (four at least, or half of the cases,
            were no truncated responses).
    """
    grades = _grades(cases, verifier, advance)
    _refuse_if_all_failed(
        [grade.reason for grade in grades if grade is not None], len(cases), verifier
    )
    return grades


def _grades(
    cases: Sequence[Case | None], verifier: VerifierPool, advance: Callable[[int], None]
) -> list[Grade | None]:
    grades = iter(
        verifier.grade_batch(
            [case for case in cases if case is not None], on_done=lambda *_: advance(1)
        )
    )
    advance(sum(case is None for case in cases))
    return [None if case is None else next(grades) for case in cases]


def _refuse_if_all_failed(reasons: Sequence[str], cases: int, verifier: VerifierPool) -> None:
    # One failure may be chance where the other responses were cut
    are_enough = reasons and len(reasons) >= min(_ENOUGH_FAILURES, cases / 2)
    if are_enough and all(reason in FAILED for reason in reasons):
        verifier.refuse(f"failed on all of {len(reasons)} responses")
