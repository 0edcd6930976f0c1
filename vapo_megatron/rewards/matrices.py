r"""Matrices and vectors as rows of texts, whatever the notation: \begin{pmatrix}, Matrix([[...]]), [[...]], [a, b]."""

import re
from itertools import chain

from vapo_megatron.rewards.values import parted

Rows = list[list[str]]

_ENVIRONMENT = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(?P<body>.*?)\\end\{\1\}", re.DOTALL)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?|\\(?=\s)|\\cr\b")


def matrix_rows(text: str) -> Rows | None:
    """The entries of a text that is one matrix and nothing else, by row; None if it is not."""
    text = text.strip()
    if match := _ENVIRONMENT.fullmatch(text):
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
