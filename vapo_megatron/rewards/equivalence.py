"""Whether two answers say the same, as far as that can be told without a computer algebra system."""

import re
from fractions import Fraction

from vapo_megatron.rewards.normal_form import PlainNumber, compact, normal_form, plain_number, words

# A decimal stands for every number that it is a rounding of: 0.333333 for 1/3 (six places, as math-verify has it),
# but not 0.0000001 for 0.0000002.
ABSOLUTE_TOLERANCE = Fraction(1, 2_000_000)
RELATIVE_TOLERANCE = Fraction(1, 100_000)

_CHOICE = re.compile(r"\(?([A-J])\)?(?:[.):]\s*\S.*)?", re.DOTALL)
_PERCENT = re.compile(r"%|\bpercent|\bpct\b", re.IGNORECASE)
_BASE = re.compile(r"(?<![a-zA-Z])\d_\{?\d")


def quick_comparison(ground_truth: str, answer: str) -> bool | None:
    """Compare two answers as strings and plain numbers; None: mathematics is needed to tell.

    Percent is part of the value (50 % is 1/2, 10 % is not 10), and so is a written base (1101_2 is not 1101).
    """
    ground_truth, answer = normal_form(ground_truth), normal_form(answer)
    if not ground_truth or not answer:
        return False
    if compact(ground_truth) == compact(answer):
        return True
    gold_number, answer_number = plain_number(ground_truth), plain_number(answer)
    if gold_number is not None and answer_number is not None:
        return _same_number(gold_number, answer_number)
    gold_words, answer_words = words(ground_truth), words(answer)
    if gold_words and gold_words == answer_words:
        return True
    if len(gold_words.strip("()")) == 1 and (choice := _CHOICE.fullmatch(gold_words.upper())):
        offered = _CHOICE.fullmatch(words(answer).upper())
        if offered is not None:
            return offered[1] == choice[1]
    if bool(_PERCENT.search(ground_truth)) != bool(_PERCENT.search(answer)) and (gold_number or answer_number):
        return False
    if "=" not in ground_truth + answer and bool(_BASE.search(ground_truth)) != bool(_BASE.search(answer)):
        return False
    return None


def _same_number(ground_truth: PlainNumber, answer: PlainNumber) -> bool | None:
    if ground_truth.base is not None or answer.base is not None:
        return ground_truth.base == answer.base and ground_truth.digits == answer.digits
    if ground_truth.value == answer.value:
        return True
    if ground_truth.decimal_comma or answer.decimal_comma:
        return None
    if ground_truth.exact and answer.exact:
        return False
    difference = abs(ground_truth.value - answer.value)
    return difference <= ABSOLUTE_TOLERANCE and difference <= RELATIVE_TOLERANCE * abs(ground_truth.value)
