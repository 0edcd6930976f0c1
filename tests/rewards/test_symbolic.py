"""What math-verify decides, with its faults mended: sets, matrices, formulas in text, and what it
is not asked."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from math_verify import grader

from vapo_megatron.rewards import symbolic
from vapo_megatron.rewards.math import Comparison, Grade, grade, settle
from vapo_megatron.rewards.symbolic import equivalent, too_costly


@pytest.fixture(autouse=True)
def _parsed_anew() -> None:
    symbolic._parsed.cache_clear()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x<-1 or x>2", r"(-\infty,-1)\cup(2,\infty)", True),
        (r"x<-1 \text{ or } x>2", r"x>2 \lor x<-1", True),
        (r"x<-1 \text{ or } x>2", "x<-1", False),
        (r"x<-1 \text{ or }", "x<-1", False),
        (r"x<-1 \text{ or } y>2", r"x<-1 \text{ or } y>2", True),
        ("x=1 or x=2", r"\{1,2\}", True),
        (r"4 \text{ or } n \geq 6", r"n=4 \text{ or } n \ge 6", True),
        ("1 or 2", "1 or 3", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,3)", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2,3)", False),
        (r"\begin{pmatrix} 1 \ 2 \end{pmatrix}", r"\left[ 1, 2 \right]", True),
        (r"\begin{pmatrix} 10\% \\ 2 \end{pmatrix}", "(10,2)", False),
        (r"X\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", False),
        (r" $ \begin{pmatrix} 1 \\ \sin^2 x+\cos^2 x \end{pmatrix} $ ", r"$ [1,1] $", True),
        (r"\(7\)", "$7$", True),
        ("7", "$7$ or $8$", False),
        ("foo bar", "foo bar", True),
        ("foo bar", "baz", False),
        ("x=5", "5", True),
        ("x^2", "x^2=4", False),
        ("x>3", r"(3,\infty)", True),
        (r"\frac{x}{0}", "1", False),
        (r"\sqrt{Aa+Bb+Cc}", r"\sqrt{bB+cC+aA}", True),
        (r"\sqrt{Aa+Bb+Cc}", r"\sqrt{Aa+Bc+Cb}", False),
        (r"\sqrt{Aa+Bb}", r"\sqrt{Ab+Ba}", False),
        (r"\sqrt{Aa+q}", r"\sqrt{qa+A}", False),
        (r"\sqrt{(D+d)\Delta}", r"\sqrt{\Delta D+\Delta d}", True),
        # math-verify reads products of letters, and no words
        (r"\angle ABC", r"\angle BAC", False),
        (r"n \text{ even}", r"n \text{ odd}", False),
        # equations in one letter have the same solutions, complex ones too
        ("x^2=4", "x^2-4=0", True),
        ("x^2+2=3x", "x^2-3x+2=0", True),
        ("2x^2=8", "x^2=4", True),
        ("(x-1)^2=0", "x-1=0", True),
        ("x^2-3x=2", "x^2+2=3x", False),
        ("x^2+1=0", "x^2+4=0", False),
        ("x^2=4", "y^2=4", False),
        ("x+y=2", "y=2-x", True),
        (r"\sin x=\cos x", r"\cos x=\sin x", True),
    ],
)
def test_formulas_are_compared_both_ways(one: str, other: str, same: bool) -> None:
    # Math-verify's own time limits would work in the main thread alone
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(equivalent, one, other, answer_is_formula=True).result() is same
        assert thread.submit(equivalent, other, one, answer_is_formula=True).result() is same


@pytest.mark.parametrize(
    ("rows", "other_rows", "same"),
    [
        (["x^2 & x>0", "1 & x=0"], ["1 & x=0", "x^2 & x>0"], True),
        (
            ["x^2 & x>0", "1 & x=0"],
            [r"x \cdot x, & \text{if } x>0;", r"1 & \mbox{for } x=0."],
            True,
        ),
        (["x^2 & x>0", "1 & x=0"], ["x^2 & x>0", "1 & x=0", "."], True),
        (["x^2 & x>0", "1 & x=0"], ["x^2 & 0<x", "1 & x=0"], True),
        (["x^2 & x>0", "1 & x=0"], ["x^2 & x>1", "1 & x=0"], False),
        (["x^2 & x>0", "1 & x=0"], ["x^3 & x>0", "1 & x=0"], False),
        (["x^2 & x>0", "1 & x=0"], ["x^2 & x=0", "1 & x>0"], False),
        (["x^2 & x>0", "1 & x=0"], ["x^2 & x>0"], False),
        ([".5 & x>0", "1 & x=0"], [r"\frac12 & x>0", "1 & x=0"], True),
        (["2X & x>0", "1 & x=0"], ["2 & x>0", "1 & x=0"], False),
        (["1 & x=0", "0 &"], ["1 & x=0", "2 &"], False),
    ],
)
def test_cases_match_by_value_and_condition(
    rows: list[str], other_rows: list[str], same: bool
) -> None:
    one, other = (
        r"\begin{cases} " + r" \\ ".join(texts) + r" \end{cases}" for texts in (rows, other_rows)
    )
    for written in (f"f(x)={one}", f"y=f(x)={one}", f"${one}$"):
        assert equivalent(written, other, answer_is_formula=True) is same
        assert equivalent(other, written, answer_is_formula=True) is same
    for factor in ("2", "X"):
        assert not equivalent(one, factor + other, answer_is_formula=True)
        assert not equivalent(factor + one, other, answer_is_formula=True)


@pytest.mark.parametrize("changed", ["1+{}", "{}+1", "2{}", r"f(x)=\frac{{1}}{{2}}{}"])
def test_cases_with_an_operation_are_another_function(changed: str) -> None:
    cases = r"\begin{cases} 1 & x > 0 \\ 2 & x < 0 \end{cases}"
    assert equivalent(cases, f"f(x)={cases}", answer_is_formula=True)
    assert not equivalent(cases, changed.format(cases), answer_is_formula=True)
    assert not equivalent(changed.format(cases), cases, answer_is_formula=True)


@pytest.mark.parametrize(
    ("ground_truth", "answer", "same"),
    [
        ("7", "so it is 7 of them", True),
        ("7", "so it is 8 of them", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "it is (1,2)", False),
    ],
)
def test_a_formula_is_looked_for_in_text(ground_truth: str, answer: str, same: bool) -> None:
    assert equivalent(ground_truth, answer, answer_is_formula=False) is same
    assert not equivalent(ground_truth, answer, answer_is_formula=True)


def test_want_of_memory_is_told_and_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> None:
        def compare(*_: object, **__: object) -> bool:
            raise error

        monkeypatch.setattr(grader, "sympy_expr_eq", compare)

    fail(RecursionError())
    assert not equivalent("x+1", "2+x", answer_is_formula=True)
    fail(MemoryError())
    with pytest.raises(MemoryError):
        equivalent("x+1", "2+x", answer_is_formula=True)


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ("x^{10000}", "x^{10001}"),
        ("x**-10000", "x ** (-10001)"),
        ("x^2+y^9", "x^2+y^{99999}"),
        ("2000!", "(2001) !"),
        ("3!+2000!", "3!+2001!"),
        ("((x+1)^{10}+y)^{100}", "((x+1)^{10}+y)^{101}"),
        ("2^{3}+4^{5}", "2^3^4"),
        ("3!+4!", "3!!"),
        ("(2^3)+4!", "(1+2^3)!"),
        (r"\binom{99999}{2}", r"\binom{100000}{2}"),
        ("(" * 40 + "1" + ")" * 40, "[" * 41 + "1" + "]" * 41),
        ("(1)" * 50, "{" * 41),
        ("X" * 41, "(X" * 41),
    ],
)
def test_what_costs_too_much_is_told_by_its_numbers(allowed: str, refused: str) -> None:
    assert not too_costly(allowed)
    assert too_costly(refused)
    assert settle(Comparison("7", refused, answer_is_formula=True)) == Grade(
        False, "too_complex", refused
    )


def test_a_number_and_what_varies_are_told_apart_by_two_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sympy looks for half a minute for what a large binomial and a sine share."""
    # Both have letters or not, and yet are equal: sympy decides.
    assert equivalent("1", r"\sin^2 x+\cos^2 x", answer_is_formula=True)
    assert not grade(r"\sin^2 x+\cos^2 x", r"\boxed{\frac{999999}{1000000}}")

    def only_texts(one: object, other: object, **_: object) -> bool:
        if not isinstance(one, str) and not isinstance(other, str):
            pytest.fail("left to sympy")
        return one == other

    monkeypatch.setattr(symbolic, "verify", only_texts)
    assert not grade(r"\binom{4020}{1005}", r"\boxed{2\sin x\cos x}")
    assert not grade(r"2\log x", r"\boxed{\binom{40}{5}}")
    assert not grade("x+y+10", r"\boxed{\binom{40}{5}}")

    def all_but_texts(one: object, other: object, **_: object) -> bool:
        return not isinstance(one, str) and not isinstance(other, str)

    monkeypatch.setattr(symbolic, "verify", all_but_texts)
    assert equivalent("f(x)", "1", answer_is_formula=True)  # cannot be evaluated
    # But for rounding
    assert equivalent(r"10^9\frac{x^{y}x^{1-y}}{x}", "10^9", answer_is_formula=True)
