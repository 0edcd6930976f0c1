"""One evaluation set, with responses and grades made up here."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from vapo_megatron.errors import TryAgain
from vapo_megatron.evaluation.metrics import bootstrap_interval
from vapo_megatron.evaluation.sets import answer_set
from vapo_megatron.experience.sample import FinishReason, Prompt, Sample

PROMPTS = [Prompt(id=f"p{n}", problem=f"problem {n}", answer=str(n), token_ids=(n,), source="file") for n in range(3)]
# What each of four responses to each problem says; None was cut off before it said anything.
ANSWERS: list[list[str | None]] = [["0", "0", "7", None], ["8", "8", "1", "9"], ["2", "2", "2", "2"]]


class Engine:
    """Answers as ANSWERS has it, the response to prompt g and index i being g + i + 1 tokens long."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []

    def collect(self, prompts: Sequence[Prompt], k: int) -> list[Sample]:
        self.asked = list(prompts)
        return [self._sample(prompt, group, index) for group, prompt in enumerate(prompts) for index in range(k)]

    def grade(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            answer = ANSWERS[sample.group][sample.index]
            sample.text, sample.extracted = f"#### {answer}", answer or ""
            sample.correct, sample.grade_reason = answer == sample.prompt.answer, "equal"

    def _sample(self, prompt: Prompt, group: int, index: int) -> Sample:
        length = group + index + 1
        reason: FinishReason = "length" if ANSWERS[group][index] is None else "stop"
        return Sample(
            prompt=prompt,
            group=group,
            index=index,
            seed=0,
            response_ids=[1] * length,
            rollout_logprobs=[0.0] * length,
            finish_reason=reason,
            weight_version=3,
            weight_version_oldest=3,
        )


def test_the_figures_of_a_set() -> None:
    engine = Engine()
    result = answer_set("sums", PROMPTS, 4, engine.collect, engine.grade)
    assert (result.name, result.problems, result.samples) == ("sums", 3, 4)
    assert result.avg_at_k == pytest.approx((2 + 1 + 4) / 12)
    assert (result.low, result.high) == bootstrap_interval([0.5, 0.25, 1.0])
    assert result.pass_at_k == 1.0
    # 0 wins with two votes of three, 8 with two of four, 2 with all.
    assert result.maj_at_k == pytest.approx((1 + 0 + 1) / 3)
    assert result.response_length == pytest.approx((1 + 2 + 3 + 4 + 2 + 3 + 4 + 5 + 3 + 4 + 5 + 6) / 12)
    assert result.truncated == pytest.approx(1 / 12)


def test_answers_that_are_right_in_different_words_vote_together() -> None:
    engine = Engine()

    def grade(samples: Sequence[Sample]) -> None:
        engine.grade(samples)
        for sample in samples:
            sample.extracted = ("1/2", "0.5", "3", "3")[sample.index]
            sample.correct = sample.index < 2

    result = answer_set("halves", PROMPTS, 4, engine.collect, grade)
    # Two of a kind against two of a kind: a tie, which chance decides.
    assert result.maj_at_k == pytest.approx(0.5)


def test_wrong_answers_in_different_words_vote_together_too() -> None:
    engine = Engine()

    def grade(samples: Sequence[Sample]) -> None:
        engine.grade(samples)
        for sample in samples:
            sample.extracted = ("33", "34", "$34$", r"\(34.0\)")[sample.index]
            sample.correct = sample.index == 0

    assert answer_set("wrong", PROMPTS, 4, engine.collect, grade).maj_at_k == 0.0


def test_every_problem_has_a_cursor_of_its_own_that_depends_on_its_place_alone() -> None:
    engine = Engine()
    answer_set("sums", PROMPTS, 4, engine.collect, engine.grade)
    assert [(p.id, p.cursor, p.source) for p in engine.asked] == [(f"p{n}", n, "sums") for n in range(3)]
    assert [p.token_ids for p in engine.asked] == [p.token_ids for p in PROMPTS]


def test_metric_names_carry_set_and_k() -> None:
    engine = Engine()
    result = answer_set("aime2024", PROMPTS, 4, engine.collect, engine.grade)
    metrics = result.metrics()
    assert metrics["evaluation/aime2024_avg@4"] == result.avg_at_k
    assert metrics["evaluation/aime2024_pass@4"] == result.pass_at_k
    assert metrics["evaluation/aime2024_truncated"] == result.truncated
    assert "avg@4 0.583" in result.line("step 3") and result.line("step 3").startswith("step 3: aime2024")


def test_every_response_is_kept_for_people_to_read(tmp_path: Path) -> None:
    engine, outputs = Engine(), tmp_path / "evaluation" / "sums.jsonl"
    answer_set("sums", PROMPTS, 4, engine.collect, engine.grade, outputs)
    rows = [json.loads(line) for line in outputs.read_text().splitlines()]
    assert [(row["id"], row["index"]) for row in rows] == [(f"p{n}", i) for n in range(3) for i in range(4)]
    assert rows[3] == {
        "id": "p0",
        "index": 3,
        "problem": "problem 0",
        "answer": "0",
        "response": "#### None",
        "extracted": "",
        "correct": False,
        "grade_reason": "equal",
        "tokens": 4,
        "finish_reason": "length",
        "weight_version": 3,
    }


def test_a_collection_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def collect(prompts: Sequence[Prompt], k: int) -> list[Sample]:
        raise TryAgain("the engine is gone")

    with pytest.raises(TryAgain, match="gone"):
        answer_set("sums", PROMPTS, 4, collect, Engine().grade, tmp_path / "sums.jsonl")
    assert not list(tmp_path.iterdir())
