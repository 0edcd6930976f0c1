"""Grades on samples: what a truncated response counts for, who is asked about it, and what failures
amount to."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.sample import FinishReason, Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.grading import TRUNCATED, failed_share, grade_samples, grades_of
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case, VerifierPool


def sample(finish: FinishReason) -> Sample:
    return Sample(
        Prompt("1", "p", "a", (1,), extra={"level": 3}), 0, 0, 0, [5, 6], [0.0, 0.0], finish, 0, 0
    )


class Verifier(VerifierPool):
    """Grades by the response's text, in this process; refuses as a pool with a function that fails
    does."""

    def __init__(self) -> None:
        self.asked: list[Case] = []

    def grade_batch(
        self,
        cases: Sequence[Case | tuple[str, str]],
        on_done: Callable[[int, Grade], None] | None = None,
    ) -> list[Grade]:
        assert on_done is not None
        grades = []
        for index, case in enumerate(cases):
            assert isinstance(case, Case)
            self.asked.append(case)
            failed = case.response in ("error", "timeout")
            grades.append(
                Grade(False, case.response) if failed else Grade(True, "equal", "found", 0.75)
            )
            on_done(index, grades[-1])
        return grades

    def refuse(self, what: str) -> None:
        raise BadInput(what)


def test_a_function_is_given_the_fields_of_its_row() -> None:
    config = RewardConfig(verifier="function", function="reward_functions:obey", workers=1)
    of_two = [
        replace(sample("stop"), prompt=Prompt("1", "p", "a", (1,), extra={"score": s}))
        for s in (0.25, 2)
    ]
    with VerifierPool(config) as verifier:
        verifier.check([Prompt("1", "p", "a", (), extra={"score": 1})])
        grade_samples(of_two, verifier, lambda ids: "text", config)
    assert [s.reward for s in of_two] == [0.25, 2]


@pytest.mark.parametrize(("asked", "reward"), [(False, -1.0), (True, 0.25)])
def test_a_function_sees_truncated_responses_where_it_asks_to(asked: bool, reward: float) -> None:
    config = RewardConfig(
        verifier="function",
        function="reward_functions:half_for_what_was_cut",
        workers=1,
        grade_truncated=asked,
    )
    samples = [sample("stop"), sample("length")]
    with VerifierPool(config) as verifier:
        grade_samples(samples, verifier, lambda ids: "text", config)
    assert [s.reward for s in samples] == [1.0, reward]
    assert [s.correct for s in samples] == [True, False]
    assert (samples[1].grade_reason == TRUNCATED) is not asked


def test_row_with_own_reward_uses_it_where_nothing_is_verified() -> None:
    config = RewardConfig(incorrect=-1.0)
    verifier = Verifier()
    row = Prompt("1", "p", "a", (1,), reward='{"incorrect": -0.25, "verifier": "code"}')
    samples = [
        sample("length"),
        replace(sample("length"), prompt=row),
        replace(sample("stop"), prompt=row),
    ]
    grade_samples(samples, verifier, lambda ids: "text", config)
    assert [s.reward for s in samples] == [-1.0, -0.25, 0.75]
    assert [case.reward for case in verifier.asked] == [row.reward]


@pytest.mark.parametrize("asked", [False, True])
def test_every_sample_gets_text_and_grade_and_is_counted_once(asked: bool) -> None:
    config = RewardConfig(
        verifier="function", function="m:f", incorrect=-0.5, grade_truncated=asked
    )
    samples = [sample("length"), sample("stop"), sample("abort"), sample("stop")]
    verifier = Verifier()
    counted = []
    grade_samples(samples, verifier, lambda ids: f"text of {len(ids)}", config, counted.append)
    assert {s.text for s in samples} == {"text of 2"}
    extra = [{"truncated": cut} for cut in (True, False, False)] if asked else [{}, {}]
    assert verifier.asked == [Case("a", "text of 2", "p", {"level": 3, **given}) for given in extra]
    graded = (0.75, True, "equal", "found")
    not_asked = (-0.5, False, TRUNCATED, "")
    found = [(s.reward, s.correct, s.grade_reason, s.extracted) for s in samples]
    assert found == [graded if asked else not_asked, graded, not_asked, graded]
    assert sum(counted) == 4


def test_failures_are_a_share_and_all_failing_is_refused() -> None:
    config = RewardConfig(verifier="function", function="m:f")
    verifier = Verifier()

    def share(*texts: str | None) -> float:
        samples = [sample("length" if text is None else "stop") for text in texts]
        said = iter(text or "" for text in texts)
        grade_samples(samples, verifier, lambda ids: next(said), config)
        return failed_share(samples, verifier)

    assert share() == 0
    assert share("error", "4", "timeout", None) == 0.5
    # Mostly truncated: that says little of the function
    assert share("error", None, None) == pytest.approx(1 / 3)
    with pytest.raises(BadInput, match="failed on all of 2 responses"):
        share("error", "timeout", None, None)
    with pytest.raises(BadInput, match="failed on all of 4 responses"):
        share("error", "timeout", "error", "error", *[None] * 60)
    with pytest.raises(BadInput, match="failed on all of 1 responses"):
        grades_of([None, Case("a", "error")], verifier)
    assert grades_of([None, None, Case("a", "error")], verifier) == [
        None,
        None,
        Grade(False, "error"),
    ]
    assert grades_of([], verifier) == []
