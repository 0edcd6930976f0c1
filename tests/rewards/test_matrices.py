"""Matrices and vectors in every notation: their entries, and which are compared with which."""

import pytest

from vapo_megatron.rewards.composite import Rows, matrix_rows, paired_entries, vector_entries


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (r" \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ", [["1", "2"], ["3", "4"]]),
        ("\\begin{array}{cc} 1 & 2 \\\\[2pt]\n 3 & 4 \\\\ \\end{array}", [["1", "2"], ["3", "4"]]),
        (r"\begin{bmatrix}1\cr 2\end{bmatrix}", [["1"], ["2"]]),
        ("Matrix( [[1, f(2, 3)], [3, 4]] )", [["1", "f(2, 3)"], ["3", "4"]]),
        ("Matrix([\n[1],\n[2]])", [["1"], ["2"]]),
        ("[[1,2],\n[{3,4}, 5]]", [["1", "2"], ["{3,4}", "5"]]),
        (r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}", None),
        (r"\begin{pmatrix}\end{pmatrix}", None),
        (r"2\begin{pmatrix}1\end{pmatrix}", None),
        ("[1, 2]", None),
        ("Matrix(5)", None),
    ],
)
def test_a_matrix_is_its_rows(text: str, rows: Rows | None) -> None:
    assert matrix_rows(text) == rows


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("(X, 2, X)", ["X", "2", "X"]),
        ("(1, (2)", ["1, (2"]),
        (" [a,\n(b, c), d] ", ["a", "(b, c)", "d"]),
        ("<1,{2, 3}>", ["1", "{2, 3}"]),
        (r"\langle 1, 2\rangle", ["1", "2"]),
        ("[[1, 2]]", ["1", "2"]),
        ("[[1], [2]]", ["1", "2"]),
        ("[[1, 2], [3, 4]]", None),
        ("(1)", None),
        ("1, 2", None),
    ],
)
def test_a_vector_is_its_entries(text: str, entries: list[str] | None) -> None:
    assert vector_entries(text) == entries


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("[[1, 2], [3, 4]]", "[[5, 6], [7, 8]]", [("1", "5"), ("2", "6"), ("3", "7"), ("4", "8")]),
        ("[[1, 2]]", "[[3], [4]]", []),
        ("[[1, 2]]", "(3, 4)", [("1", "3"), ("2", "4")]),
        ("[[1], [2]]", "(3, 4, 5)", []),
        ("[[1, 2], [3, 4]]", "(1, 2, 3, 4)", None),
        ("[[1, 2]]", "5", None),
        ("(1, 2)", "(1, 2)", None),
    ],
)
def test_entries_are_paired_where_one_is_a_matrix(
    one: str, other: str, pairs: list[tuple[str, str]] | None
) -> None:
    swapped = pairs if pairs is None else [(b, a) for a, b in pairs]
    assert paired_entries(one, other) == pairs
    assert paired_entries(other, one) == swapped
