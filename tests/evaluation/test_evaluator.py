"""One evaluation set, with responses and grades made up here."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import FinishReason, Prompt, Sample
from vapo_megatron.errors import TryAgain
from vapo_megatron.evaluation.evaluator import Evaluator, generate_with
from vapo_megatron.evaluation.metrics import bootstrap_interval
from vapo_megatron.evaluation.responses import ResponseLog
from vapo_megatron.evaluation.sets import SetResult, numbered
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import Case, VerifierPool
from vapo_megatron.rollout.request import GenerationRequest

PROMPTS = [
    Prompt(id=f"p{n}", problem=f"problem {n}", answer=str(n), token_ids=(n,), source="file")
    for n in range(3)
]
# What each of four responses to each problem says; None was cut off before it said anything.
SAMPLING = SamplingConfig(max_new_tokens=9)
ANSWERS: list[list[str | None]] = [
    ["0", "0", "7", None],
    ["8", "8", "1", "9"],
    ["2", "2", "2", "2"],
]


def decode(ids: Sequence[int]) -> str:
    return f"#### {ANSWERS[ids[0] // 10][ids[0] % 10]}"


class Engine:
    """Answers as ANSWERS has it, the response to prompt g and index i being g + i + 1 tokens
    long."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None,
        on_group: Callable[[list[Sample]], None] | None,
    ) -> list[Sample]:
        """The last group comes first."""
        assert on_done is not None and on_group is not None
        self.requests.append(request)
        for group, prompt in reversed(list(enumerate(request.prompts))):
            on_done(request.samples_per_prompt)
            on_group(
                [self._sample(prompt, group, index) for index in range(request.samples_per_prompt)]
            )
        return []

    def _sample(self, prompt: Prompt, group: int, index: int) -> Sample:
        length = group + index + 1
        place = int(prompt.answer)
        reason: FinishReason = "length" if ANSWERS[place][index] is None else "stop"
        return Sample(
            prompt=prompt,
            group=group,
            index=index,
            seed=0,
            response_ids=np.full(length, 10 * place + index, dtype=np.int32),
            rollout_logprobs=np.zeros(length, dtype=np.float32),
            finish_reason=reason,
            weight_version=3,
            weight_version_oldest=3,
        )


class Verifier:
    """Correct is who says the ground truth, or as `correct` has it by index; extracted likewise."""

    def __init__(self, extracted: Sequence[str] = (), correct: Sequence[bool] = ()) -> None:
        self.extracted = extracted
        self.correct = correct
        self.cases: list[Case] = []

    def grade_batch(
        self, cases: Sequence[Case], on_done: Callable[[int, Grade], None]
    ) -> list[Grade]:
        grades = []
        for number, case in enumerate(cases):
            said = case.response.removeprefix("#### ")
            correct = self.correct[number % 4] if self.correct else said == case.ground_truth
            grades.append(
                Grade(correct, "equal", self.extracted[number % 4] if self.extracted else said)
            )
            on_done(number, grades[-1])
        self.cases += cases
        return grades


def evaluate(
    name: str,
    outputs: Path,
    verifier: Verifier,
    engine: Engine | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
) -> SetResult:
    evaluator = Evaluator(cast(VerifierPool, verifier), RewardConfig())
    problems = numbered(name, prompts)
    generator = generate_with((engine or Engine()).collect, decode, SAMPLING, 7, 3, RewardConfig())
    responses = evaluator.answer(name, problems, 4, generator)
    return evaluator.conclude(name, problems, responses, 4, outputs / f"{name}.jsonl")[0]


def test_the_metrics_of_a_set(tmp_path: Path) -> None:
    verifier = Verifier()
    result = evaluate("sums", tmp_path, verifier)
    assert (result.name, result.problems, result.samples) == ("sums", 3, 4)
    assert result.avg_at_k == pytest.approx((2 + 1 + 4) / 12)
    assert (result.low, result.high) == bootstrap_interval([0.5, 0.25, 1.0])
    assert result.pass_at_k == 1.0
    # 0 wins with two votes of three, 8 with two of four, 2 with all.
    assert result.maj_at_k == pytest.approx((1 + 0 + 1) / 3)
    assert result.response_length == pytest.approx(
        (1 + 2 + 3 + 4 + 2 + 3 + 4 + 5 + 3 + 4 + 5 + 6) / 12
    )
    assert result.truncated == pytest.approx(1 / 12)
    assert len(verifier.cases) == 11, "a truncated response is not verified"
    assert verifier.cases[0] == Case("0", "#### 0", problem="problem 0")


def test_answers_that_are_right_in_different_words_vote_together(tmp_path: Path) -> None:
    verifier = Verifier(("1/2", "0.5", "3", "3"), (True, True, False, False))
    # Two of a kind against two of a kind: a tie, which chance decides.
    assert evaluate("halves", tmp_path, verifier, prompts=PROMPTS[1:]).maj_at_k == pytest.approx(
        0.5
    )


def test_wrong_answers_in_different_words_vote_together_too(tmp_path: Path) -> None:
    verifier = Verifier(("33", "34", "$34$", r"\(34.0\)"), (True, False, False, False))
    assert evaluate("wrong", tmp_path, verifier, prompts=PROMPTS[1:]).maj_at_k == 0.0


def test_chains_in_free_text_vote_by_their_answers(tmp_path: Path) -> None:
    texts = [f"{chain} The answer is {n}." for chain, n in (("a", 8), ("b", 8), ("c", 9), ("d", 7))]
    with VerifierPool(RewardConfig(answer_format="auto", workers=1)) as pool:
        grades = pool.grade_batch([("9", text) for text in texts])
    assert [grade.extracted for grade in grades] == ["8", "8", "9", "7"]
    verifier = Verifier([grade.extracted for grade in grades], [grade.correct for grade in grades])
    assert evaluate("chains", tmp_path, verifier, prompts=PROMPTS[1:]).maj_at_k == 0.0
    verifier = Verifier(["8", "8", "9", "9"], [True, True, False, False])
    assert evaluate("tie", tmp_path, verifier, prompts=PROMPTS[1:]).maj_at_k == pytest.approx(0.5)


def test_responses_without_read_answers_do_not_vote_as_one(tmp_path: Path) -> None:
    """A function, a judge, code's tests: maj@k is no second pass@k."""
    verifier = Verifier(("", "", "", ""), (True, False, False, False))
    result = evaluate("scored", tmp_path, verifier, prompts=PROMPTS[1:])
    assert (result.pass_at_k, result.avg_at_k, result.maj_at_k) == (1.0, 0.25, 0.25)


def test_problem_cursors_depend_only_on_their_place(
    tmp_path: Path,
) -> None:
    engine = Engine()
    evaluate("sums", tmp_path, Verifier(), engine)
    (request,) = engine.requests
    assert [(p.id, p.cursor, p.source) for p in request.prompts] == [
        (f"p{n}", n, "sums") for n in range(3)
    ]
    assert [p.token_ids for p in request.prompts] == [p.token_ids for p in PROMPTS]
    assert (request.sampling, request.seed, request.weight_version) == (SAMPLING, 7, 3)


def test_earlier_answers_are_not_requested_again(tmp_path: Path) -> None:
    evaluator = Evaluator(cast(VerifierPool, Verifier()), RewardConfig())
    problems = numbered("sums", PROMPTS)
    engine = Engine()
    generator = generate_with(engine.collect, decode, SAMPLING, 7, 3, RewardConfig())
    log = ResponseLog(tmp_path / "log", problems, 4, "origin")
    first = evaluator.answer("sums", problems[1:2], 4, generator, log)
    log = ResponseLog(tmp_path / "log", problems, 4, "origin")
    responses = evaluator.answer("sums", problems, 4, generator, log)
    assert [[p.id for p in request.prompts] for request in engine.requests] == [
        ["p1"],
        ["p0", "p2"],
    ]
    assert [(one.id, one.index) for one in responses] == [
        (f"p{n}", i) for n in range(3) for i in range(4)
    ]
    assert responses[4:8] == first


def test_metric_names_carry_set_and_k(tmp_path: Path) -> None:
    result = evaluate("aime2024", tmp_path, Verifier())
    metrics = result.metrics()
    assert metrics["evaluation/aime2024_avg@4"] == result.avg_at_k
    assert metrics["evaluation/aime2024_pass@4"] == result.pass_at_k
    assert metrics["evaluation/aime2024_truncated"] == result.truncated
    assert "avg@4 0.583" in result.line("step 3") and result.line("step 3").startswith(
        "step 3: aime2024"
    )


def test_every_response_is_kept_for_people_to_read(tmp_path: Path) -> None:
    evaluate("sums", tmp_path / "evaluation", Verifier())
    rows = [
        json.loads(line)
        for line in (tmp_path / "evaluation" / "sums.jsonl").read_text().splitlines()
    ]
    assert [(row["id"], row["index"]) for row in rows] == [
        (f"p{n}", i) for n in range(3) for i in range(4)
    ]
    assert rows[3] == {
        "id": "p0",
        "index": 3,
        "problem": "problem 0",
        "answer": "0",
        "response": "#### None",
        "extracted": "",
        "correct": False,
        "grade_reason": "truncated",
        "tokens": 4,
        "finish_reason": "length",
        "weight_version": 3,
        "prompt_ids": [0],
        "response_ids": rows[3]["response_ids"],
    }
    assert len(rows[3]["response_ids"]) == 4


def test_a_collection_that_fails_leaves_no_file(tmp_path: Path) -> None:
    class Gone(Engine):
        def collect(self, *_: object) -> list[Sample]:
            raise TryAgain("the engine is gone")

    with pytest.raises(TryAgain, match="gone"):
        evaluate("sums", tmp_path, Verifier(), Gone())
    assert not list(tmp_path.iterdir())
