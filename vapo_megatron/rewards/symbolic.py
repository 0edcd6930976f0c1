"""Comparison by math-verify (sympy). Importing this takes half a second, and running it may never end.

It has no time limit of its own (math-verify's needs signal.alarm, hence the main thread): the worker processes of
rewards.pool run it under a deadline and a memory limit. too_costly refuses the plainest bombs before that.
"""

import logging
import re
from functools import lru_cache
from itertools import accumulate, chain

from math_verify import parse, verify
from sympy import Expr, Set, Union
from sympy.core.relational import Equality

from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.normal_form import normal_form
from vapo_megatron.rewards.values import parted

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
Rows = list[list[str]]

_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(?P<body>.*?)\\end\{\1\}", re.DOTALL)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?|\\(?=\s)|\\cr\b")
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[")


def too_costly(text: str) -> bool:
    """Whether text holds a power tower, a huge exponent, factorial or binomial, a high power of a sum of high powers,
    or is nested deeper than any answer."""
    if _TOWER.search(text) or "!!" in text or _BIG_FACTORIAL.search(text) or _BIG_BINOMIAL.search(text):
        return True
    if any(int(inner) * int(outer) > _LARGEST_POWER_OF_SUM for inner, outer in _POWER_OF_SUM.findall(text)):
        return True
    if any(depth > _DEEPEST_NESTING for depth in accumulate((c in "([{") - (c in ")]}") for c in text)):
        return True
    limits = ((_EXPONENT, _LARGEST_EXPONENT), (_FACTORIAL, _LARGEST_FACTORIAL))
    return any(int(digits) > most for pattern, most in limits for digits in pattern.findall(text))


def equivalent(ground_truth: str, answer: str, answer_is_formula: bool) -> bool:
    """Whether math-verify, given both texts in normal form, finds them equal.

    answer_is_formula: the answer is a formula alone; else one is looked for in it, by math-verify's own rules.
    MemoryError passes through; whatever else goes wrong within the libraries means "not equal".
    """
    if answer_is_formula and (pairs := paired_entries(_rows_kept(ground_truth), _rows_kept(answer))) is not None:
        return bool(pairs) and all(
            equivalent(*pair, True) if (same := quick_comparison(*pair)) is None else same for pair in pairs
        )
    truth_forms = _parsed(ground_truth, True)
    answer_forms = _parsed(answer, answer_is_formula)
    return any(_verify(true_form, form) for true_form in truth_forms for form in answer_forms)


def _rows_kept(text: str) -> str:
    """text in normal form, unless it holds an environment, whose row ends the normal form might take for spaces."""
    return text.strip().strip("$").strip() if r"\begin" in text else normal_form(text)


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
    except (NotImplementedError, AttributeError, LookupError, ValueError, TypeError):  # no relation, or not solvable
        return None


def _one_is_constant(one: Expr, other: Expr) -> bool:
    """Whether one of two formulas is a number, the other not. Sympy may look for what they share for minutes."""
    return one.is_number != other.is_number and _varies(other if one.is_number else one)


def _varies(formula: Expr) -> bool:
    """Whether a formula has different values at two points; no where it cannot be evaluated there."""
    try:
        letters = sorted(formula.free_symbols, key=str)
        first, second = (
            complex(formula.subs({letter: point ** (1 + n / 7) for n, letter in enumerate(letters)}))
            for point in (0.7312890625, 1.618033988749895)
        )
    except Exception:  # as below
        return False
    return abs(first - second) > 1e-6 * max(abs(first), abs(second))


def _verify(ground_truth: object, answer: object) -> bool:
    if isinstance(ground_truth, Expr) and isinstance(answer, Expr) and _one_is_constant(ground_truth, answer):
        return False
    try:
        return verify(ground_truth, answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # untrusted text may raise anything inside sympy, and none of it is an error of ours
        return False


def matrix_rows(text: str) -> Rows | None:
    """The entries of a text that is one matrix and nothing else, by row; None if it is not."""
    text = text.strip()
    if match := _MATRIX.fullmatch(text):
        rows = [[entry.strip() for entry in row.split("&")] for row in _ROW_END.split(match["body"]) if row.strip()]
    else:
        text = re.sub(r"^Matrix\s*\((.*)\)$", r"\1", text, flags=re.DOTALL).strip()
        if not re.fullmatch(r"\[\s*\[.*\]\s*\]", text, re.DOTALL):
            return None
        rows = [_entries(row) for row in re.findall(r"\[([^\[\]]*)\]", text[1:-1])]
    return rows if rows and len({len(row) for row in rows}) == 1 else None


def vector_entries(text: str) -> list[str] | None:
    """The entries of (a, b), [a, b], <a, b> or of a matrix with one row or one column; None if it is neither."""
    if (rows := matrix_rows(text)) is not None:
        flat = [entry for row in rows for entry in row]
        return flat if 1 in (len(rows), len(rows[0])) else None
    match = re.fullmatch(r"\[(.*)\]|\((.*)\)|<(.*)>|\\langle\b(.*)\\rangle", text.strip(), re.DOTALL)
    inner = match[match.lastindex or 0] if match else ""
    return _entries(inner) if "," in inner else None


def paired_entries(ground_truth: str, answer: str) -> list[tuple[str, str]] | None:
    """Entries to compare one by one; [] if the shapes differ; None unless one text is a matrix and both have entries.

    A vector may be written as a row, a column or a list; other matrices must have the same shape.
    """
    true_rows, answer_rows = matrix_rows(ground_truth), matrix_rows(answer)
    if true_rows is None and answer_rows is None:
        return None
    if true_rows is not None and answer_rows is not None:
        if (len(true_rows), len(true_rows[0])) == (len(answer_rows), len(answer_rows[0])):
            return list(zip(chain(*true_rows), chain(*answer_rows), strict=True))
        return []
    true_vector, answer_vector = vector_entries(ground_truth), vector_entries(answer)
    if true_vector is None or answer_vector is None:
        return None
    return list(zip(true_vector, answer_vector, strict=True)) if len(true_vector) == len(answer_vector) else []


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in parted(text) or [text]]
