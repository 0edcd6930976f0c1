"""Comparison by math-verify (sympy). Importing this takes half a second, and running it may never
end.

It has no time limit (math-verify's needs signal.alarm, hence the main thread): the
worker processes of rewards.pool run it under a deadline and a memory limit. too_costly refuses the
plainest bombs before that.
"""

import logging
import re
from functools import lru_cache
from itertools import accumulate

from math_verify import parse, verify
from sympy import Expr, Poly, Set, Union
from sympy.core.relational import Equality

from vapo_megatron.rewards.composite import Parts, parts_of
from vapo_megatron.rewards.doubt import covers, differs_in_numbers, is_doubtful
from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.normal_form import normal_form

# It warns that its own time limit is off, once in every process.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LARGEST_EXPONENT = 10_000
_LARGEST_FACTORIAL = 2_000
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*\{?\s*\(?-?(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*\)?\s*!")
_TOWER = re.compile(r"(?:(?:\^|\*\*)\s*[{(]*\s*-?\w+\s*){2}")
_LARGEST_POWER_OF_SUM = 1_000
_BIG_FACTORIAL = re.compile(r"\^[^!()]*\)\s*!")
_BIG_BINOMIAL = re.compile(r"binom\s*\{[^{}]*(?:\^|\d{6})")
_POWER_OF_SUM = re.compile(r"\^\s*\{?(\d+)\}?[^()]*\)\s*\^\s*\{?(\d+)")
_DEEPEST_NESTING = 40
_OR = re.compile(r"\s*(?:\\text\{\s*or\s*\}|\\lor\b|\\vee\b|(?<![a-zA-Z\\])or(?![a-zA-Z]))\s*")
_NAMED = re.compile(r"\s*([a-zA-Z](?:_\{?\w+\}?)?)\s*=")
_RELATIVE = 1e-4  # of two numbers that are equal up to rounding
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[")


def too_costly(text: str) -> bool:
    """Whether text holds a power tower, a huge exponent, factorial or binomial, a high power of a
    sum of high powers, or is nested deeper than any answer."""
    if (
        _TOWER.search(text)
        or "!!" in text
        or _BIG_FACTORIAL.search(text)
        or _BIG_BINOMIAL.search(text)
    ):
        return True
    if any(
        int(inner) * int(outer) > _LARGEST_POWER_OF_SUM
        for inner, outer in _POWER_OF_SUM.findall(text)
    ):
        return True
    if any(
        depth > _DEEPEST_NESTING for depth in accumulate((c in "([{") - (c in ")]}") for c in text)
    ):
        return True
    limits = ((_EXPONENT, _LARGEST_EXPONENT), (_FACTORIAL, _LARGEST_FACTORIAL))
    return any(int(digits) > most for pattern, most in limits for digits in pattern.findall(text))


def equivalent(ground_truth: str, answer: str, answer_is_formula: bool) -> bool:
    """Whether two answers are equal: part by part where they have parts, else by math-verify, with
    its faults mended.

    answer_is_formula: the answer is a formula alone; else one is looked for in it, by math-verify's
        own rules.
    MemoryError passes through; whatever else goes wrong within the libraries means "not equal".
    """
    if answer_is_formula:
        parts = parts_of(ground_truth, answer)
        if parts is not None:
            return _same_parts(parts)
    truth_forms = _parsed(ground_truth, True)
    answer_forms = _parsed(answer, answer_is_formula)
    for true_form in truth_forms:
        for form in answer_forms:
            if not _verify(true_form, form):
                continue
            if not answer_is_formula or _is_believed(ground_truth, answer, true_form, form):
                return True
    return False


def _same_parts(parts: Parts) -> bool:
    ground_truths = parts.ground_truths
    answers = list(parts.answers)
    if not ground_truths or len(ground_truths) != len(answers):
        return False
    if parts.ordered:
        return all(_same_part(*pair) for pair in zip(ground_truths, answers, strict=True))
    for ground_truth in ground_truths:
        match = next((a for a in answers if _same_part(ground_truth, a)), None)
        if match is None:
            return False
        answers.remove(match)
    return True


def _same_part(ground_truth: str, answer: str) -> bool:
    names = [name.match(text) for name, text in ((_NAMED, ground_truth), (_NAMED, answer))]
    if names[0] and names[1] and names[0][1] != names[1][1]:
        return False  # x = 1 is not y = 1
    same = quick_comparison(ground_truth, answer)
    return equivalent(ground_truth, answer, True) if same is None else same


def _is_believed(ground_truth: str, answer: str, true_form: object, form: object) -> bool:
    """Whether two texts that math-verify finds equal are so, judged by the texts and the values
    show."""
    if is_doubtful(ground_truth, answer):
        return False
    are_formulas = isinstance(true_form, Expr) and isinstance(form, Expr)
    if not are_formulas:
        return not differs_in_numbers(ground_truth, answer)
    assert isinstance(true_form, Expr) and isinstance(form, Expr)
    if not covers(ground_truth, str(true_form)) or not covers(answer, str(form)):
        return False
    return not _far_apart(true_form, form)


def _far_apart(one: Expr, other: Expr) -> bool:
    """Whether two numbers differ by more than rounding: math-verify rounds to six decimals, so that
    tiny ones agree."""
    if not (one.is_number and other.is_number):
        return False
    try:
        difference = abs((one - other).evalf(30))
        largest = max(abs(one.evalf(30)), abs(other.evalf(30)))
        return bool(difference > _RELATIVE * largest)
    except Exception:  # as below
        return False


def read_answer(text: str) -> str:
    """The part of a text in which math-verify finds the answer; the text itself where it finds
    none."""
    forms = _parsed(text, False)
    strings = [form for form in forms if isinstance(form, str)]
    return strings[-1] if strings else text


@lru_cache(maxsize=256)  # a group's responses share their ground truth
def _parsed(text: str, is_formula: bool) -> list[object]:
    if is_formula and not _ENVIRONMENT.search(normal := normal_form(text)):
        if (union := _union_of_relations(normal)) is not None:
            return [union]
        forms = parse(f"${normal}$", parsing_timeout=None)
        if any(not isinstance(form, str) for form in forms):
            return forms
    return parse(text, parsing_timeout=None)


def _union_of_relations(text: str) -> Set | None:
    """The set that "x < -1 or x > 2" describes: math-verify reads only one of the two."""
    pieces = _OR.split(text)
    if len(pieces) < 2:
        return None
    try:
        relations = [parse(f"${piece}$", parsing_timeout=None)[0] for piece in pieces]
        if any(isinstance(relation, Equality) for relation in relations):
            return None
        return Union(*(relation.as_set() for relation in relations))
    except (
        NotImplementedError,
        AttributeError,
        LookupError,
        ValueError,
        TypeError,
    ):  # no relation, or not solvable
        return None


def _one_is_constant(one: Expr, other: Expr) -> bool:
    """Whether one of two formulas is a number, the other not. Sympy may look for a common form
    for minutes."""
    return one.is_number != other.is_number and _varies(other if one.is_number else one)


def _varies(formula: Expr) -> bool:
    """Whether a formula has different values at two points; no where it cannot be evaluated
    there."""
    try:
        letters = sorted(formula.free_symbols, key=str)
        first, second = (
            complex(
                formula.subs({letter: point ** (1 + n / 7) for n, letter in enumerate(letters)})
            )
            for point in (0.7312890625, 1.618033988749895)
        )
    except Exception:  # as below
        return False
    return abs(first - second) > 1e-6 * max(abs(first), abs(second))


def _same_equation(one: Equality, other: Equality) -> bool | None:
    """Whether two equations have the same solutions; None unless both are polynomials in the same
    one variable.

    math-verify compares real solutions alone, and finds all equations equal that have none.
    """
    letters = one.free_symbols | other.free_symbols
    if len(letters) != 1:
        return None
    try:
        polynomials = [
            Poly(side.lhs - side.rhs, *letters).sqf_part().monic() for side in (one, other)
        ]
    except Exception:  # as below: no polynomials
        return None
    return bool(polynomials[0] == polynomials[1])


def _verify(ground_truth: object, answer: object) -> bool:
    if (
        isinstance(ground_truth, Expr)
        and isinstance(answer, Expr)
        and _one_is_constant(ground_truth, answer)
    ):
        return False
    if isinstance(ground_truth, Equality) and isinstance(answer, Equality):
        same = _same_equation(ground_truth, answer)
        if same is not None:
            return same
    try:
        return verify(
            ground_truth,
            answer,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except (
        Exception
    ):  # untrusted text may raise anything inside sympy, and none of it is an error of ours
        return False
