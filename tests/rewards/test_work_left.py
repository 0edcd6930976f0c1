"""Answers that leave the work to the reader: unevaluated expressions, and expressions of the
problem."""

import json
from pathlib import Path

import pytest

from vapo_megatron.rewards.math import grade, grade_response
from vapo_megatron.rewards.work_left import is_copied, leaves_work, stands_in

CASES = Path(__file__).parents[3] / "shared" / "cases" / "verifier" / "unevaluated.jsonl"

OPEN = [
    ("29", "33 - 4"),
    ("29", r"\boxed{33-4}"),
    ("29", r"\boxed{x = 33 - 4}"),
    ("29", "So it must be 33 - 4."),
    ("29", r"\boxed{33 - 4 =}"),
    ("29", "Answer: $33 - 4$"),
    ("29", r"\boxed{29 + 0}"),
    ("29", r"\boxed{\frac{58}{2}}"),
    ("29", r"\boxed{58/2}"),
    ("29", r"\boxed{-(-29)}"),
    ("29", r"\boxed{|-29|}"),
    ("29", r"\boxed{29^1}"),
    ("1024", r"<answer>2^{10}</answer>"),
    ("1024", r"\boxed{2**10}"),
    ("120", r"\boxed{5!}"),
    ("15", r"\boxed{\binom{6}{2}}"),
    ("15", r"\boxed{{6 \choose 2}}"),
    ("4", r"\boxed{\gcd(12, 20)}"),
    ("4", r"\boxed{\operatorname{lcm}(2, 4)}"),
    ("3", r"\boxed{\log_2 8}"),
    ("56", r"\boxed{7(8)}"),
    ("56", r"\boxed{(7)(8)}"),
    ("56", r"\boxed{7 \cdot 8 \text{ cm}}"),
    ("20", r"\boxed{25\% \text{ of } 80}"),
    ("1.5", r"\boxed{0.75 \cdot 2}"),
    ("0.5", r"\boxed{1 - \frac{1}{2}}"),
    ("3/4", r"\boxed{\frac{1}{2}+\frac{1}{4}}"),
    ("2, 3", r"\boxed{1 + 1, 3}"),
    ("(2, 3)", r"\boxed{(2, 7 - 4)}"),
    ("x = 29", r"\boxed{x = 33 - 4}"),
    (r"29 \text{ cm}", r"\boxed{33 - 4}"),
    ("3", r"\boxed{\lfloor 3.7 \rfloor}"),
    ("2", r"\boxed{17 \bmod 5}"),
]
DONE = [
    ("29", "33 - 4 = 29"),
    ("29", r"\boxed{33 - 4 = 29}"),
    ("29", r"\boxed{29 = 33 - 4}"),
    ("29", "So 33 - 4 is 29."),
    ("-3", r"\boxed{-3}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    ("1/2", r"\boxed{\frac{2}{4}}"),
    ("0.5", r"\boxed{50\%}"),
    (r"50\%", r"\boxed{\frac12}"),
    ("1.5", r"\boxed{1 \frac{1}{2}}"),
    ("1.5", r"\boxed{1 1/2}"),
    ("1000", r"\boxed{10^3}"),
    ("1000", r"\boxed{1 \times 10^{3}}"),
    ("0.00042", r"\boxed{4.2 \cdot 10^{-4}}"),
    ("0.00042", r"\boxed{4.2e-4}"),
    ("4", r"\boxed{\sqrt{16}}"),
    ("12", r"\boxed{12\text{ cm}^2}"),
    ("12", r"\boxed{12 \text{ m/s}}"),
    ("60^\\circ", r"\boxed{60}"),
    ("2^{10}", r"\boxed{4^5}"),
    ("2^{10}", r"\boxed{1024}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    (r"3 + \sqrt{2}", r"\boxed{\sqrt{2} + 3}"),
    ("2x", r"\boxed{2 \cdot x}"),
    (r"\frac{\pi}{2}", r"\boxed{\frac{2\pi}{4}}"),
    ("2, 3", r"\boxed{2 \text{ and } 3}"),
    ("1,000", r"\boxed{1000}"),
]


@pytest.mark.parametrize(("ground_truth", "response"), OPEN)
def test_an_operation_left_to_carry_out_is_wrong(ground_truth: str, response: str) -> None:
    assert not grade(ground_truth, response)


@pytest.mark.parametrize(("ground_truth", "response"), DONE)
def test_finished_forms_stay_right(ground_truth: str, response: str) -> None:
    assert grade(ground_truth, response)


def test_the_reason_says_what_is_missing() -> None:
    assert grade_response("29", r"\boxed{33-4}").reason == "unevaluated"
    assert grade_response("29", r"\boxed{33-5}").reason == "different"


@pytest.mark.skipif(not CASES.is_file(), reason=f"needs {CASES}")
def test_shared_cases_of_unevaluated_answers() -> None:
    for line in CASES.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert grade(row["gold"], row["prediction"]) is row["correct"], row


@pytest.mark.parametrize(
    ("problem", "ground_truth", "answer", "copied"),
    [
        ("Factor $x^2 - 5x + 6$.", "(x-2)(x-3)", "x^2-5x+6", True),
        ("Factor $x^2 - 5x + 6$.", "(x-2)(x-3)", "x^{2}-5x+6", True),
        ("Factor $x^2 - 5x + 6$.", "(x-2)(x-3)", "(x-3)(x-2)", False),
        ("What is 33 - 4?", "29", "33-4", True),
        ("What is 33 × 4?", "132", r"33 \cdot 4", True),
        ("What is 33 - 4?", "-1", "3-4", False),
        ("What is 33 - 44?", "29", "33-4", False),
        ("Which is larger, $2^{10}$ or $3^6$?", "2^{10}", "2^{10}", False),
        ("Which is larger, $2^{10}$ or $4^{5}+1$?", "4^5+1", "4^{5}+1", False),
        ("Three of 8 apples are red. Which share?", r"\frac{3}{8}", "3/8", False),
        ("Is $n^2+n$ odd or even?", r"\text{even}", "even", False),
        ("", "29", "33-4", False),
    ],
)
def test_an_expression_of_the_problem_is_no_answer(
    problem: str, ground_truth: str, answer: str, copied: bool
) -> None:
    assert stands_in(problem, answer, ground_truth) is copied
    reason = grade_response(ground_truth, rf"\boxed{{{answer}}}", "marked", problem).reason
    assert (reason == "copied") is copied
    assert leaves_work(ground_truth, "5") is False


@pytest.mark.parametrize(
    ("problem", "ground_truth", "answer", "correct"),
    [
        ("Find $x^{2}$ if $3x^2 = 75$.", "25", "x^2 = 25", True),
        ("Find a positive $x$ whose square is 25.", "25", "x^2 = 25", False),
        ("Let $k = 4$. What is $k + 1$?", "5", "k+1 = 5", True),
        ("Find $x + y$.", "x+y = 5", "5", True),
        ("The sum of two numbers is 5. Write an equation.", "x+y = 5", "5", False),
        ("Find $12x + 1$.", "5", "2x + 1 = 5", False),
    ],
)
def test_an_equation_left_to_solve_is_not_its_right_side(
    problem: str, ground_truth: str, answer: str, correct: bool
) -> None:
    """Unless the problem asks for its left side."""
    settled = grade_response(ground_truth, rf"\boxed{{{answer}}}", problem=problem)
    assert settled.correct == correct
    assert settled.extracted == answer


def test_free_text_that_restates_the_problem_is_no_answer() -> None:
    problem = "Factor x^2 - 5x + 6."
    response = "It should be $x^2 - 5x + 6$."
    assert grade_response("(x-2)(x-3)", response, "auto", problem).reason == "copied"
    assert grade_response("(x-2)(x-3)", response, "auto").correct


def test_a_passage_of_the_problem_is_copied_for_any_verifier() -> None:
    problem = "Which city is the capital of France? Name it."
    assert is_copied(problem, "the capital of France? Name it.", "Paris")
    assert not is_copied(problem, "Paris", "Paris")
    assert not is_copied(problem, "Paris is the capital of France.", "Paris")


def test_a_short_expression_is_copied_for_any_verifier() -> None:
    problem = "Factor $x^2 - 5x + 6$."
    assert is_copied(problem, "x^2-5x+6", "(x-2)(x-3)")
    assert not is_copied(problem, "(x-3)(x-2)", "(x-2)(x-3)")
    assert not is_copied(problem, "x^2-5x+6", "x^2-5x+6"), "the ground truth stands there too"
