"""One spelling for each answer, and numbers as they are written."""

from fractions import Fraction

import pytest

from vapo_megatron.rewards.normal_form import compact, normal_form, plain_number, words


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\u22125", "-5"),
        ("３，５", "3,5"),
        ("2×3", r"2\times 3"),
        (r"$$ 5 $$", "5"),
        (r"\( x \)", "x"),
        (r"\[x\]", "x"),
        ("** 7 **", "7"),
        ("`7`", "7"),
        ("$x$, $y$", "$x$, $y$"),
        ("$x$.", "x"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (
            r"\begin{pmatrix}1\\frac{1}{2}\end{pmatrix}",
            r"\begin{pmatrix}1\\frac{1}{2}\end{pmatrix}",
        ),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac1{20}", r"\frac{1}{20}"),
        (r"\frac{1}2", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"1{,}000\,000", "1000000"),
        ("3{,}5", "3.5"),
        (r"\left( 1, 2 \right)", "(1, 2)"),
        ("1.5e-3", r"1.5\times 10^{-3}"),
        (r"1 \text{ and } 2", "1, 2"),
        ("(101)_2", "101_2"),
        ("3 1/2", "3+1/2"),
        ("-3 1/2", r"-3\frac{1}{2}"),
        (r"2 \frac{1}{3}", r"2\frac{1}{3}"),
        (r"-2\, \dfrac13 \%", r"-2\frac{1}{3}\%"),
        (r"2 \frac{x}{3}", r"2 \frac{x}{3}"),
        (r"\text{12 cm}", "12 cm"),
        (r"\mathrm{ 5 }", "5"),
        (r"\text{A 5}", r"\text{A 5}"),
        (r"\{x \mid x > 2\}", "x>2"),
        (r"\left\{x \in \mathbb{R} \,\middle|\, -1 < x \leq 2\right\}", r"-1<x \leq 2"),
        (r"\{x \mid x > 2, x \ne 3\}", r"\{x \mid x>2, x \ne 3\}"),
        (r"\begin{cases} x = 1, \\ y = 2 \end{cases}", "x=1, y=2"),
        (r"\begin{cases}x&y\end{cases}", r"\begin{cases}x&y\end{cases}"),
        (r"\$5", "5"),
        ("5 ., ;:", "5"),
        (r"5\;", "5"),
        ("  a \n b ", "a b"),
        ("", ""),
        (".", ""),
        ("$", "$"),
        ("$$", "$$"),
    ],
)
def test_typesetting_goes(text: str, normal: str) -> None:
    assert normal_form(text) == normal
    assert normal_form(normal) == normal


@pytest.mark.parametrize(
    ("text", "said"), [("a b", "ab"), ("1 2", "1 2"), ("1 a 2", "1a2"), ("a  b", "ab")]
)
def test_spaces_part_numbers_alone(text: str, said: str) -> None:
    assert compact(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"\text{No Solution}", "no solution"),
        (r" A\mathrm{b} \textbf{ C }", "a b c"),
        ("X  Y", "x y"),
    ],
)
def test_words_are_small_and_unwrapped(text: str, said: str) -> None:
    assert words(text) == said


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("34", "34", "exact"),
        ("+034", "34", "exact"),
        ("-34", "-34", "exact"),
        ("0", "0", "exact"),
        ("1,234,567.5", "1234567.5", "decimal"),
        ("1 234", "1234", "exact"),
        ("1,234", "1234", "exact"),
        ("999,000", "999000", "exact"),
        ("1234,567", "1234.567", "comma"),
        ("0,234", "0.234", "comma"),
        ("1,22", "1.22", "comma"),
        (".5", "1/2", "decimal"),
        ("$5", "5", "exact"),
        (r"\frac{3}{4}", "3/4", "exact"),
        (r"\frac{-3}{4}", "-3/4", "exact"),
        (r"-2\frac{3}{4}", "-11/4", "exact"),
        ("3/4", "3/4", "exact"),
        ("-1.5/4", "-3/8", "exact"),
        ("50%", "1/2", "exact"),
        (r"50\%", "1/2", "exact"),
        ("50 PERCENT", "1/2", "exact"),
        ("50 percentage", "1/2", "exact"),
        ("50 pct", "1/2", "exact"),
        (r"60^\circ", "60", "exact"),
        ("60 degrees", "60", "exact"),
        ("1101_{10}", "1101", "exact"),
        ("9" * 1000, "9" * 1000, "exact"),
    ],
)
def test_a_number_has_its_value(text: str, value: str, kind: str) -> None:
    found = plain_number(text)
    assert found is not None
    said = "exact" if found.exact else "comma" if found.decimal_comma else "decimal"
    assert (found.value, said, found.base) == (Fraction(value), kind, None)


@pytest.mark.parametrize(
    ("text", "base", "digits"),
    [("1101_2", 2, "1101"), ("+0011_{12}", 12, "11"), ("-0011_3", 3, "-11")],
)
def test_a_number_with_a_base_keeps_its_digits(text: str, base: int, digits: str) -> None:
    found = plain_number(text)
    assert found is not None
    assert (found.base, found.digits) == (base, digits)


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{1}{0}",
        r"2\frac{-1}{2}",
        "1/0",
        "1/0.0",
        "1.5_2",
        r"\frac{1}{2}_2",
        "1,22_3",
        "x",
        "1 2",
        "",
        "9" * 1001,
    ],
)
def test_what_is_no_number_is_left_alone(text: str) -> None:
    assert plain_number(text) is None
