r"""Answers that consist of parts: matrices, vectors, lists, cases. Which part is compared with
which."""

import re
from dataclasses import dataclass
from itertools import chain

from vapo_megatron.rewards.normal_form import normal_form
from vapo_megatron.rewards.values import parted

Rows = list[list[str]]
Pair = tuple[str, str]

_MATRIX = re.compile(
    r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(?P<body>.*?)\\end\{\1\}", re.DOTALL
)
_CASES = re.compile(r"\\begin\{cases\}(?P<body>.*?)\\end\{cases\}", re.DOTALL)
_OPERATION = re.compile(r"[-+*/^\d]|\\(?:cdot|times|frac|sqrt)(?![a-zA-Z])")
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?|\\(?=\s)|\\cr\b")
_DOTS = re.compile(r"\\[lc]?dots[bcmo]?(?![a-zA-Z])|\.\.\.+|…")
_OUTER = re.compile(r"\\?[{(\[](?P<inside>.*?)\\?[})\]]", re.DOTALL)
_TUPLES = re.compile(r"(?:\([^()]*,[^()]*\)\s*){2,}")
_WORD_BETWEEN = re.compile(
    r",?\s*(?:\\(?:text|textrm|mathrm|mbox)\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*",
    re.IGNORECASE,
)
_MOST_ENTRIES = 12  # of a list that is matched in any order


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts to compare: each pair, or, where they are unordered, any pairing of ground truths with
    answers."""

    ground_truths: list[str]
    answers: list[str]
    ordered: bool


def parts_of(ground_truth: str, answer: str) -> Parts | None:
    """The parts of two answers; None where they are to be compared as a whole.

    Where the shapes differ so that the answers do, one side has no parts.
    """
    pairs = paired_entries(_whole(ground_truth), _whole(answer))
    if pairs is not None:
        return Parts([true for true, _ in pairs], [other for _, other in pairs], True)
    true_cases = _case_rows(ground_truth)
    cases = _case_rows(answer)
    if true_cases is not None and cases is not None:
        return Parts(true_cases, cases, False)
    if (true_cases is None) != (cases is None) and _computes_with_cases(ground_truth, answer):
        return Parts([], [], True)
    true_entries = listed(ground_truth)
    entries = listed(answer)
    if _DOTS.search(ground_truth) or _DOTS.search(answer):
        return _sequence(true_entries, entries)
    if len(true_entries) == len(entries) and 2 <= len(entries) <= _MOST_ENTRIES:
        return Parts(true_entries, entries, False)
    return None


def listed(text: str) -> list[str]:
    """The entries of a list without brackets, between commas, semicolons, "and" and "or"; one where
    it is no list."""
    text = normal_form(text)
    if _TUPLES.fullmatch(text):
        text = re.sub(r"\)\s*\(", "),(", text)
    text = _WORD_BETWEEN.sub(",", text)
    entries = parted(text.replace(";", ",")) or [text]
    return [entry.strip() for entry in entries if entry.strip()]


def _sequence(true_entries: list[str], entries: list[str]) -> Parts | None:
    """Of lists with dots, in order; as a whole where the dots are within a sum."""
    if len(true_entries) == len(entries) == 1:
        insides = [_OUTER.fullmatch(side[0]) for side in (true_entries, entries)]
        if None in insides:
            return None
        true_entries, entries = (listed(match["inside"]) for match in insides if match)
        if len(true_entries) == len(entries) == 1:
            return None
    spelled = [[_DOTS.sub(r"\\ldots", entry) for entry in side] for side in (true_entries, entries)]
    if len(true_entries) != len(entries):
        return Parts([], [], True)
    return Parts(spelled[0], spelled[1], True)


def _computes_with_cases(*sides: str) -> bool:
    """Whether all are functions by cases, and one of them adds or multiplies something: math-verify
    reads cases as 0 in a sum."""
    return all(map(_CASES.search, sides)) and any(
        _OPERATION.search(_beside_cases(side)) for side in sides
    )


def _beside_cases(text: str) -> str:
    """What stands beside a function by cases, without a name and an equals sign before it."""
    return _CASES.sub("", text).strip(" ${}").rpartition("=")[2].strip()


def _case_rows(text: str) -> list[str] | None:
    """The rows of a function by cases, each as value and condition joined by a comma; None if there
    is no such."""
    match = _CASES.search(text)
    if match is None or _beside_cases(text):
        return None
    rows = []
    for row in _ROW_END.split(match["body"]):
        cells = [cell.strip().rstrip(",.;") for cell in row.split("&")]
        if any(cells):
            rows.append(r"\begin{pmatrix}" + " & ".join(map(_condition, cells)) + r"\end{pmatrix}")
    return rows


def _condition(cell: str) -> str:
    return re.sub(r"^\\(?:text|mbox)\{\s*(?:if|for|when)\s*\}", "", cell).strip()


def _whole(text: str) -> str:
    """text in normal form, unless it holds an environment, whose row ends the normal form might
    take for spaces."""
    return text.strip().strip("$").strip() if r"\begin" in text else normal_form(text)


def matrix_rows(text: str) -> Rows | None:
    """The entries of a text that is one matrix and nothing else, by row; None if it is not."""
    text = text.strip()
    if match := _MATRIX.fullmatch(text):
        rows = [
            [entry.strip() for entry in row.split("&")]
            for row in _ROW_END.split(match["body"])
            if row.strip()
        ]
    else:
        text = re.sub(r"^Matrix\s*\((.*)\)$", r"\1", text, flags=re.DOTALL).strip()
        if not re.fullmatch(r"\[\s*\[.*\]\s*\]", text, re.DOTALL):
            return None
        rows = [_entries(row) for row in re.findall(r"\[([^\[\]]*)\]", text[1:-1])]
    return rows if rows and len({len(row) for row in rows}) == 1 else None


def vector_entries(text: str) -> list[str] | None:
    """The entries of (a, b), [a, b], <a, b> or of a matrix with one row or one column; None if it
    is neither."""
    if (rows := matrix_rows(text)) is not None:
        flat = [entry for row in rows for entry in row]
        return flat if 1 in (len(rows), len(rows[0])) else None
    match = re.fullmatch(
        r"\[(.*)\]|\((.*)\)|<(.*)>|\\langle\b(.*)\\rangle", text.strip(), re.DOTALL
    )
    inner = match[match.lastindex or 0] if match else ""
    return _entries(inner) if "," in inner else None


def paired_entries(ground_truth: str, answer: str) -> list[tuple[str, str]] | None:
    """Entries to compare one by one; [] if the shapes differ; None unless one text is a matrix and
    both have entries.

    A vector may be written as a row, a column or a list; other matrices must have the same shape.
    """
    true_rows = matrix_rows(ground_truth)
    answer_rows = matrix_rows(answer)
    if true_rows is None and answer_rows is None:
        return None
    if true_rows is not None and answer_rows is not None:
        if (len(true_rows), len(true_rows[0])) == (len(answer_rows), len(answer_rows[0])):
            return list(zip(chain(*true_rows), chain(*answer_rows), strict=True))
        return []
    true_vector = vector_entries(ground_truth)
    answer_vector = vector_entries(answer)
    if true_vector is None or answer_vector is None:
        return None
    return (
        list(zip(true_vector, answer_vector, strict=True))
        if len(true_vector) == len(answer_vector)
        else []
    )


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in parted(text) or [text]]
