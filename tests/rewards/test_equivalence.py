"""What strings and plain numbers settle about two answers, and what they leave to mathematics."""

import pytest

from vapo_megatron.rewards.equivalence import quick_comparison

# ground truth, answer, what is said, and what of the two the other way round
CASES: list[tuple[str, str, bool | None, bool | None]] = [
    ("", "5", False, False),
    ("1 2", "12", None, None),
    # the problem handed back
    (r"\sum_{i=1}^{3} i", "6", None, False),
    (r"\sum_{i=1}^{3} i", r"\sum_{i=0}^{3} i", None, None),
    (r"\iint f", "f", None, False),
    # units
    (r" \$5 ", r" 500 \text{ cents} ", True, True),
    (r"35\mathrm{~cm}", r"0.35 \text{ m}", True, True),
    (r"5\text{ cm}", "5", True, True),
    (r"5\text{ cm}", "6", False, False),
    (r"5\text{ cm}", r"x\text{ cm}", None, None),
    (r"\frac{1}{2} \text{ m}", r"50 \text{ cm}", True, True),
    (r"\sqrt{4}\text{ m}", r"2\text{ m}", True, True),
    (r"\sqrt{4}\text{ m}", r"200\text{ cm}", False, False),
    (r"2 \text{ million}", "2000000", True, True),
    (r"2 \text{ dozen}", "25", False, False),
    (r"2 \text{ dozen}", r"24 \text{ cm}", False, False),
    (r"5\text{ m}", r"5\text{ m}^1", None, None),
    # times of day and ratios
    ("4:30 pm", "16:30", True, True),
    ("4:30 pm", "4:31 pm", False, False),
    ("4:30", "16:30", None, None),
    ("4:30", "4:30 pm", None, None),
    ("4:30 pm", "5", None, None),
    ("12:16", "3 : 4", True, True),
    ("3:4", "3:4:5", False, False),
    ("3:4", "6:9", False, False),
    ("3:4:5", "6:8:11", False, False),
    # decimals are roundings of what has no end
    ("1/3", "0.333333", True, True),
    ("1/3", "0.3333", False, False),
    ("1/4", "0.2500001", False, True),
    ("100000", "99999.9999", False, False),
    ("0.123456", "0.1234564", True, True),
    ("0.5", "0.5000005", True, True),
    ("0.01", "0.0100001", True, True),
    ("0.0100001", "0.0100002", True, True),
    ("0.123456", "0.1234566", False, False),
    ("0.0000003", "0.0000004", False, False),
    ("0.0300001", "0.0300005", False, False),
    ("0.0500001", "0.0500005", True, True),
    ("0.0400000", "0.0400004", True, True),
    ("100/3", "33.333333", True, True),
    ("1000000/3", "333333.33333", False, False),
    ("1,22", "1.22", True, True),
    ("1,22", "1.23", None, None),
    ("1,22", "1,23", None, None),
    # bases and percent belong to the value
    ("1101_2", "1101_{2}", True, True),
    ("1101_2", "1101_3", False, False),
    ("1101_2", "1011_2", False, False),
    ("1101_2", "1101", False, False),
    ("11_{10}", "11", True, True),
    ("2_3", "x", False, False),
    ("x=2_3", "2", None, None),
    ("x_1", "1", None, None),
    (r"10\%", "0.1", True, True),
    ("50 pct", "1/2", True, True),
    ("10 percent", "10", False, False),
    ("10%", "x", False, False),
    ("x%", "10", False, False),
    ("x%", "x", None, None),
    # a number and a relation
    ("42", "x<42", False, None),
    ("42", r"\le 42", False, None),
    ("42", r"\leftarrow 42", None, None),
    ("x<42", r"x \lt 42", None, None),
    # words
    (r"\text{odd}", "The answer is Odd", True, True),
    ("an ellipse", "ellipse", True, True),
    ("the circle", "a circle", True, True),
    ("circle", "ellipse", None, None),
    ("x+1", "the x+1", None, None),
    ("yes", "Yes, because it is\nso", True, True),
    ("no", "no. It is", True, True),
    ("yes", "no, it is", None, None),
    ("yes", "yesterday", None, None),
    ("no solution", r"\emptyset", True, True),
    ("no solutions", r"\{\}", True, True),
    ("DNE", "does not exist", True, True),
    ("x", "X", True, True),
    ("2B", "2b", False, False),
    # choices
    ("A", "(A)", True, True),
    ("A, B and C", "C,B,A", True, True),
    ("A and B", "A, C", False, False),
    ("(a), (b)", "(B), (A)", True, True),
    ("A, B", "apples", None, None),
    ("A", r"\text{(A) } 5", True, None),
    ("B", "(A) 5", False, None),
    ("(A)", "A. five", True, None),
    ("A", "A: five\nand six", True, None),
    ("J", r"\text{(J) } 5", True, None),
    ("A", "apple", None, None),
    ("AB", "A) 5", None, None),
]


@pytest.mark.parametrize(("ground_truth", "answer", "said", "said_swapped"), CASES)
def test_what_is_said_of_two_answers(
    ground_truth: str, answer: str, said: bool | None, said_swapped: bool | None
) -> None:
    assert quick_comparison(ground_truth, answer) is said
    assert quick_comparison(answer, ground_truth) is said_swapped
