r"""The grade on a response to a mathematics problem.

Extraction by answer format (rewards.extract), then strings and plain numbers (rewards.equivalence),
then math-verify (rewards.symbolic). The first two are cheap and safe in any process; the third must
run in a worker (rewards.pool).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vapo_megatron.data.reference_answers import alternatives
from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.extract import (
    AnswerFormat,
    boxed,
    closing_list,
    count_words,
    extract_answer,
    final_part,
    without_separators,
)
from vapo_megatron.rewards.grade import FAILED, Case, Grade
from vapo_megatron.rewards.verifier import Message, Verifier
from vapo_megatron.rewards.work_left import is_unsolved, leaves_work, stands_in

__all__ = [
    "FAILED",
    "Comparison",
    "Grade",
    "MathVerifier",
    "grade",
    "grade_response",
    "prepare",
    "settle",
]

_PERCENT_SIGN = re.compile(r"(?<=\d)%")
# Markers that enclose a formula and nothing else.
_FORMULA_MARKERS = ("boxed", "answer_tag", "hash")
LONGEST_ANSWER = 2_000  # characters; a longer one is not read


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers that strings and plain numbers could not settle."""

    ground_truth: str
    answer: str
    answer_is_formula: bool
    problem: str = ""


class MathVerifier(Verifier):
    """Compares the answer of a response with the ground truth: strings and plain numbers here, the
    rest in a worker."""

    limits_cpu_time = True

    def prepare(self, case: Case) -> Grade | Message:
        """The grade if plain string handling gives one, else the comparison that is left."""
        answer_format = self.config.answer_format
        right = alternatives(case.ground_truth) or (case.ground_truth,)
        prepared = [prepare(each, case.response, answer_format, case.problem) for each in right]
        grades = [each for each in prepared if isinstance(each, Grade)]
        left = [asdict(each) for each in prepared if isinstance(each, Comparison)]
        if not left or any(grade.correct for grade in grades):
            return _best(grades)
        if len(left) == 1:
            return left[0]
        return {"answer": left[0]["answer"], "comparisons": json.dumps(left)}

    def load(self) -> None:
        """Import sympy, which is slow."""
        import vapo_megatron.rewards.symbolic  # noqa: F401

    def grade(self, message: Message) -> dict[str, Any]:
        """The grade of math-verify."""
        left = json.loads(message["comparisons"]) if "comparisons" in message else [message]
        result = _best([settle(Comparison(**comparison)) for comparison in left])
        return {
            "correct": result.correct,
            "reason": result.reason,
            "extracted": result.extracted,
        }


def _best(grades: Sequence[Grade]) -> Grade:
    """The grade by the answer that fits, of several that are right; else the first."""
    return next((grade for grade in grades if grade.correct), grades[0])


def grade(gold: str, response: str) -> bool:
    """Whether the response gives the ground truth `gold`. Runs math-verify in this process, without
    a limit."""
    return grade_response(gold, response).correct


def grade_response(
    ground_truth: str, response: str, answer_format: AnswerFormat = "auto", problem: str = ""
) -> Grade:
    """The grade on a response, with its reason. Runs math-verify in this process, without a time
    limit."""
    grades = []
    for right in alternatives(ground_truth) or (ground_truth,):
        prepared = prepare(right, response, answer_format, problem)
        grades.append(prepared if isinstance(prepared, Grade) else settle(prepared))
    return _best(grades)


def prepare(
    ground_truth: str, response: str, answer_format: AnswerFormat = "auto", problem: str = ""
) -> Grade | Comparison:
    """A grade if plain string handling gives one, else the texts left to compare. Never imports
    sympy.

    problem: an expression that stands in it is no answer; "" if it is not known.
    """
    true_answer = boxed(ground_truth) or final_part(ground_truth).strip()
    if not true_answer:
        return Grade(False, "no_ground_truth")
    extraction = extract_answer(response, answer_format)
    answer = extraction.text
    if not answer:
        return Grade(False, "no_answer")
    if len(answer) > LONGEST_ANSWER:
        return Grade(False, "too_complex", answer[:LONGEST_ANSWER])
    if extraction.marker == "free_text":
        listed = closing_list(answer)
        if not listed:
            answer = _readable(answer, true_answer)
            return Comparison(true_answer, answer, count_words(answer) <= 1, problem)
        answer = listed
    if stands_in(problem, answer, true_answer):
        return Grade(False, "copied", answer)
    if is_unsolved(problem, answer, true_answer):
        return Grade(False, "different", answer)
    same = quick_comparison(true_answer, answer)
    if same is not None:
        return _compared(same, true_answer, answer)
    is_formula = extraction.marker in _FORMULA_MARKERS or count_words(answer) <= 1
    return Comparison(true_answer, answer, is_formula, problem)


def settle(comparison: Comparison) -> Grade:
    """The grade of math-verify on a comparison."""
    from vapo_megatron.rewards.symbolic import equivalent, read_answer, too_costly

    true_answer = comparison.ground_truth
    answer = comparison.answer
    if comparison.answer_is_formula and too_costly(answer):
        return Grade(False, "too_complex", answer)
    same = equivalent(true_answer, answer, comparison.answer_is_formula)
    if not comparison.answer_is_formula:
        answer = read_answer(answer)
        if stands_in(comparison.problem, answer, true_answer):
            return Grade(False, "copied", answer)
        if is_unsolved(comparison.problem, answer, true_answer):
            return Grade(False, "different", answer)
    return _compared(same, true_answer, answer)


def _readable(text: str, true_answer: str) -> str:
    """Free text as math-verify reads it best."""
    # In formulas the rest of the line would be a comment.
    text = _PERCENT_SIGN.sub(" percent", text)
    if re.fullmatch(r"[^a-zA-Z,]*\d{4}[^a-zA-Z,]*", true_answer.replace(",", "")):
        text = without_separators(text)
    return text


def _compared(same: bool, true_answer: str, answer: str) -> Grade:
    if same and leaves_work(true_answer, answer):
        return Grade(False, "unevaluated", answer)
    return Grade(same, "equal" if same else "different", answer, score=float(same))
