import json
import subprocess
import sys
from pathlib import Path

import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.rewards.grade import Case
from vapo_megatron.rewards.math import (
    Comparison,
    Grade,
    MathVerifier,
    grade,
    grade_response,
    prepare,
)

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"

SAME = [
    ("1000", r"\boxed{1{,}000}"),
    ("1000", r"\boxed{1\,000}"),
    ("1{,}000{,}000", "Answer: 1,000,000"),
    ("-5", "\\boxed{\u22125}"),
    ("1/2", r"\boxed{\frac12}"),
    (r"\frac12", "Answer: 0.5"),
    (r"12\frac{3}{5}", r"\boxed{63/5}"),
    ("34", "**Answer:** 34"),
    ("34", "Answer: 034"),
    ("34", "Answer: 34.0"),
    ("34", r"so it is \boxed{34}"),
    ("34", "**Final Answer:**\n\n34"),
    ("34", "<think>7?</think><answer>34</answer>"),
    ("34", r"<answer>\boxed{34}</answer>"),
    ("34", "s1 c0 #### 34"),
    ("0.333333", r"\boxed{\frac{1}{3}}"),
    ("10 %", r"\boxed{10\%}"),
    ("0.1", r"\boxed{10\%}"),
    ("1101_2", r"\boxed{1101_{2}}"),
    ("[-2,7]", r"\boxed{-2 \le x \le 7}"),
    (r"-2 \le x \le 7", r"\boxed{x \in [-2,7]}"),
    (r"(-\infty,-1)\cup(2,\infty)", r"\boxed{x<-1 \text{ or } x>2}"),
    (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}"),
    ("(1,2)", r"\boxed{\left( 1, 2 \right)}"),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\boxed{\begin{bmatrix} 1 \\ \frac42 \end{bmatrix}}",
    ),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{[1, 2]}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("x = 2, x = -3", r"\boxed{x = 2, x = -3}"),
    (r"2\pm\sqrt3", r"\boxed{2+\sqrt{3}, 2-\sqrt{3}}"),
    ("A", r"\boxed{\textbf{(A)}}"),
    ("odd", r"\boxed{\text{Odd}}"),
    (r"100\text{ square units}", r"\boxed{100}"),
    ("18", r"\boxed{\$18.00}"),
    ("7", "The answer is 7."),
    ("0.3", "The probability is 30%."),
    ("0.12", r"\boxed{12\text{ percent}}"),
    ("125000", "After ten years she has $125,000 in her account."),
    ("2, 3", "The solutions are 2 and 3."),
    ("1", r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}=1}"),
    ("5", r"\boxed{x = 5}"),
    ("5", r"\boxed{f(2) = 5}"),
    ("73", r"\boxed{m+n=73}"),
    ("5", r"\boxed{|z| = 5}"),
    ("x = 5", r"\boxed{5}"),
    ("y = 2x+1", r"\boxed{2x+1}"),
]
DIFFERENT = [
    ("345", "The total cost is 12,345 dollars."),
    ("3", "The solutions are 2 and 3."),
    ("1", r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}=2}"),
    ("1", r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}}"),
    ("10", r"\boxed{10\%}"),
    ("10%", r"\boxed{10}"),
    ("1101_2", r"\boxed{1101}"),
    ("1101", r"\boxed{1101_2}"),
    ("7", r"\boxed{7} or \boxed{8}"),
    ("8", r"\boxed{7}, \boxed{8}"),
    ("3", r"\boxed{3, 4}"),
    ("12", r"\boxed{1 2}"),
    ("32349", r"\boxed{32, 349}"),
    ("5", r"\boxed{5.001}"),
    ("1/3", r"\boxed{0.33}"),
    ("0.0000001", r"\boxed{0.0000002}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("(1,2)", r"\boxed{[1,2]}"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\boxed{[1, 3]}"),
    ("x>3", r"\boxed{x\ge 3}"),
    ("2021", r"\boxed{\pm 2021}"),
    ("A", r"\boxed{B}"),
    ("34", "Answer: 35"),
    ("5", r"\boxed{2x = 5}"),
    ("5", r"\boxed{x - 1 = 5}"),
    ("5", r"\boxed{\frac{x}{2} = 5}"),
    ("5", r"\boxed{\sqrt{x} = 5}"),
    ("25", r"\boxed{x^2 = 25}"),
    ("25", r"\boxed{x^2 = 9 + 16 = 25}"),
    ("x+1", r"\boxed{2y = x+1}"),
    ("x^2 + y^2 = 25", r"\boxed{25}"),
    ("x+y=5", r"\boxed{5}"),
]


@pytest.mark.parametrize(("ground_truth", "response"), SAME)
def test_spellings_of_one_answer_are_equal(ground_truth: str, response: str) -> None:
    assert grade_response(ground_truth, response).reason == "equal"


@pytest.mark.parametrize(("ground_truth", "response"), DIFFERENT)
def test_other_answers_are_different(ground_truth: str, response: str) -> None:
    assert grade_response(ground_truth, response).reason == "different"


def test_a_second_thought_replaces_the_first_box() -> None:
    response = r"It is \boxed{7}. Hmm, wait, \boxed{8}."
    assert grade("8", response)
    assert not grade("7", response)


@pytest.mark.parametrize("response", ["", "<think>so \\boxed{42}", "so \\boxed{42", "words only"])
def test_a_response_without_answer_is_not_correct(response: str) -> None:
    assert not grade("42", response)


def test_an_empty_gold_is_never_matched() -> None:
    assert grade_response("", r"\boxed{}") == Grade(False, "no_ground_truth")
    assert grade_response("4", r"\boxed{}") == Grade(False, "no_answer")


@pytest.mark.parametrize(
    "bomb",
    [
        "9^{9^{9^9}}",
        "99999!",
        "10^{100000000}",
        "(" * 900 + "1" + ")" * 900,
        "1" * 5_000,
        "2**3**4**5",
        "(10^{9})!",
        r"\binom{10^9}{5\cdot10^8}",
        r"\binom{1000000}{500000}",
        "((x+1)^{300}+y)^{300}",
    ],
)
def test_a_bomb_is_refused_unread(bomb: str) -> None:
    refused = grade_response("x+1", rf"\boxed{{{bomb}}}")
    assert (refused.correct, refused.reason) == (False, "too_complex")
    assert refused.extracted and bomb.startswith(refused.extracted)


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        (r"5 \cdot 24", "5!"),
        (r"\binom{4020}{1005}", r"\binom{4020}{3015}"),
        ("(x+1)^{4}", "((x+1)^{2})^{2}"),
    ],
)
def test_no_bomb_is_computed(ground_truth: str, answer: str) -> None:
    assert grade_response(ground_truth, rf"\boxed{{{answer}}}") == Grade(True, "equal", answer, 1.0)


def test_marked_does_not_search_free_text() -> None:
    assert grade_response("7", "so we get 7", "auto").correct
    assert grade_response("7", "so we get 7", "marked").reason == "no_answer"
    assert grade_response("7", "#### 7", "boxed").reason == "no_answer"


def test_plain_answers_are_settled_without_sympy() -> None:
    code = (
        "import sys\n"
        "from vapo_megatron.rewards.math import grade\n"
        "assert grade('1000', r'\\boxed{1{,}000}') and not grade('3', '#### 4') and grade('1/2', "
        "'Answer: 0.5')\nassert 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=240
    )


def test_mathematics_is_left_to_a_comparison() -> None:
    assert not isinstance(prepare(r"\sin 2x", r"\boxed{2\sin x\cos x}"), Grade)
    assert prepare("12", r"\boxed{12}") == Grade(True, "equal", "12", 1.0)


@pytest.mark.parametrize(
    ("ground_truths", "answer", "compared", "correct"),
    [
        (["4", "5"], "5", 0, True),
        (["4", "5"], "6", 0, False),
        (["4", r"\sin 2x"], "4", 0, True),
        ([r"10\%", r"\sin 2x"], r"2\sin x\cos x", 1, True),
        ([r"\cos 2x", r"\sin 2x"], r"2\sin x\cos x", 2, True),
        ([r"\sin 2x", r"\cos 2x"], r"2\sin x\cos x", 2, True),
        ([r"\sin 2x", r"\cos 2x"], r"\sin x\cos x", 2, False),
    ],
)
def test_any_of_several_ground_truths_makes_it_right(
    ground_truths: list[str], answer: str, compared: int, correct: bool
) -> None:
    verifier = MathVerifier(RewardConfig())
    case = Case(json.dumps(ground_truths), rf"\boxed{{{answer}}}")
    prepared = verifier.prepare(case)
    reason = "equal" if correct else "different"
    if compared == 0:
        assert prepared == Grade(correct, reason, answer, float(correct))
        return
    assert isinstance(prepared, dict)
    assert prepared["answer"] == answer, "which a grade shows if the comparison takes too long"
    assert len(json.loads(prepared.get("comparisons", "[0]"))) == compared
    assert verifier.grade(prepared) == {"correct": correct, "reason": reason, "extracted": answer}


@pytest.mark.parametrize(
    ("response", "answer", "is_formula"),
    [
        (r"\boxed{some value y}", "some value y", True),
        ("<answer>some value y</answer>", "some value y", True),
        ("#### some value y", "some value y", True),
        ("Answer: value y", "value y", True),
        ("Answer: some value y", "some value y", False),
        ("as x < 8 it is in the end 7", "as x < 8 it is in the end 7", False),
        (r"\boxed{" + "y" * 2_000 + "}", "y" * 2_000, True),
    ],
)
def test_what_is_marked_as_an_answer_is_a_formula(
    response: str, answer: str, is_formula: bool
) -> None:
    assert prepare("7", response) == Comparison("7", answer, answer_is_formula=is_formula)


def test_ground_truth_is_its_boxes_or_the_text_after_its_thought() -> None:
    assert prepare(r"so \boxed{7} and \boxed{8}", "Answer: y,z") == Comparison(
        "7, 8", "y,z", answer_is_formula=True
    )
    assert prepare("<think>6</think> 7z ", "Answer: y") == Comparison(
        "7z", "y", answer_is_formula=True
    )
    assert prepare("7", r"\boxed{" + "y" * 2_001 + "}") == Grade(False, "too_complex", "y" * 2_000)
    assert prepare("7", r"\boxed{8}") == Grade(False, "different", "8")


def _shared_rows(name: str) -> list[dict]:
    path = SHARED_DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_agreement_on_public_cases_is_at_least_math_verifys() -> None:
    import math_verify

    rows = [row for row in _shared_rows("answer_equivalence_public.jsonl") if not row["tags"]]
    ours = sum(grade(row["gold"], row["prediction"]) == row["expected"] for row in rows)
    theirs = sum(
        math_verify.verify(math_verify.parse(row["gold"]), math_verify.parse(row["prediction"]))
        == row["expected"]
        for row in rows
    )
    assert ours >= theirs
    assert ours / len(rows) > 0.95


def test_agreement_on_real_responses() -> None:
    rows = _shared_rows("real_responses_public.jsonl")
    agreed = sum(grade(row["answer"], row["response"]) == row["correct"] for row in rows)
    assert agreed / len(rows) > 0.97


@pytest.mark.parametrize(
    "response,correct",
    [
        ("#### 5 #### 4", True),  # the last marker counts, also on one line
        ("#### 4 #### 5", False),
        ("#### 5 7 #### 5 plus 4", False),
        ("#### 4 5", False),  # several answers are no answer
        ("#### 0 1 2 3 4", False),
    ],
)
def test_several_hash_answers_cannot_be_a_lottery(response: str, correct: bool) -> None:
    assert grade_response("4", response, "hash").correct is correct
    assert grade_response("4", response, "marked").correct is correct


@pytest.mark.parametrize(
    "response,correct",
    [
        (r"\boxed{33 \cup 34}", False),
        (r"\boxed{33 \vee 34}", False),
        (r"\boxed{x = 33 \lor x = 34}", False),
        ("\\boxed{33 \u2228 34}", False),
        (r"\boxed{|A \cup B| = 34}", True),
    ],
)
def test_several_joined_answers_are_not_one_of_them(response: str, correct: bool) -> None:
    assert grade_response("34", response, "marked").correct is correct
