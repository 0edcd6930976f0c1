r"""The grade on a response to a mathematics problem.

Extraction by answer format (rewards.extract), then strings and plain numbers (rewards.equivalence), then math-verify
(rewards.symbolic). The first two are cheap and safe in any process; the third must run in a worker (rewards.pool).
"""

import re
from dataclasses import dataclass
from typing import Literal

from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.extract import (
    AnswerFormat,
    Extraction,
    boxed,
    closing_list,
    count_words,
    extract_answer,
    final_part,
    without_separators,
)

# equal, different: the answers were compared. no_answer: none found in the answer format. no_ground_truth: there is
# none. too_complex: refused unread. timeout, memory, crashed: what became of the worker. error: a function raised.
# scored: by a user's function.
Reason = Literal[
    "equal",
    "different",
    "no_answer",
    "no_ground_truth",
    "too_complex",
    "timeout",
    "memory",
    "crashed",
    "error",
    "scored",
]

# Reasons of a grade that says nothing of the response.
FAILED: frozenset[Reason] = frozenset({"timeout", "memory", "crashed", "error"})

_PERCENT_SIGN = re.compile(r"(?<=\d)%")
LONGEST_ANSWER = 2_000  # characters; a longer one is not read


@dataclass(frozen=True, slots=True)
class Grade:
    """A verifier's grade of one response.

    extracted is the answer that was compared, detail explains reasons such as error, score is the reward
    (1 or 0 unless a pool was configured otherwise).
    """

    correct: bool
    reason: Reason
    extracted: str = ""
    score: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers that strings and plain numbers could not settle."""

    ground_truth: str
    answer: str
    answer_is_formula: bool


def grade(gold: str, response: str) -> bool:
    """Whether the response gives the ground truth `gold`. Runs math-verify in this process, without a limit."""
    return grade_response(gold, response).correct


def grade_response(ground_truth: str, response: str, answer_format: AnswerFormat = "auto") -> Grade:
    """The grade on a response, with its reason. Runs math-verify in this process, without a time limit."""
    prepared = prepare(ground_truth, response, answer_format)
    return prepared if isinstance(prepared, Grade) else settle(prepared)


def prepare(ground_truth: str, response: str, answer_format: AnswerFormat = "auto") -> Grade | Comparison:
    """A grade if plain string handling gives one, else what is left to compare. Never imports sympy."""
    true_answer = boxed(ground_truth) or final_part(ground_truth).strip()
    if not true_answer:
        return Grade(False, "no_ground_truth")
    extraction = extract_answer(response, answer_format)
    if not extraction.text:
        return Grade(False, "no_answer")
    if len(extraction.text) > LONGEST_ANSWER:
        return Grade(False, "too_complex", extraction.text[:LONGEST_ANSWER])
    if extraction.marker != "free_text":
        same = quick_comparison(true_answer, extraction.text)
        if same is not None:
            return _compared(same, extraction.text)
    elif listed := closing_list(extraction.text):
        same = quick_comparison(true_answer, listed)
        return Comparison(true_answer, listed, True) if same is None else _compared(same, listed)
    else:
        text = _PERCENT_SIGN.sub(" percent", extraction.text)  # in formulas the rest of the line would be a comment
        if re.fullmatch(r"[^a-zA-Z,]*\d{4}[^a-zA-Z,]*", true_answer.replace(",", "")):
            text = without_separators(text)
        extraction = Extraction(text, extraction.marker)
    enclosed = extraction.marker in ("boxed", "answer_tag", "hash")
    return Comparison(true_answer, extraction.text, answer_is_formula=enclosed or count_words(extraction.text) <= 1)


def settle(comparison: Comparison) -> Grade:
    """The grade of math-verify on a comparison."""
    from vapo_megatron.rewards.symbolic import equivalent, too_costly

    if comparison.answer_is_formula and too_costly(comparison.answer):
        return Grade(False, "too_complex", comparison.answer)
    same = equivalent(comparison.ground_truth, comparison.answer, comparison.answer_is_formula)
    return _compared(same, comparison.answer)


def _compared(same: bool, answer: str) -> Grade:
    return Grade(same, "equal" if same else "different", answer, score=float(same))
