"""What math-verify answers that one would not guess (docs/dependencies.md)."""

import pytest
from math_verify import parse, verify


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"\{1,2\}", "(1,2)", True),
        ("(1,2)", r"\{1,2\}", True),
        (r"\{1,2\}", "[1,2]", False),
        ("[1,2]", r"\{1,2\}", False),
        (r"\{1,2\}", "(1,3)", False),
    ],
)
def test_a_set_equals_an_open_interval_of_its_numbers(gold: str, answer: str, equal: bool) -> None:
    # "(1,2)" parses as an open interval and may have meant a pair: math-verify lets it be the set,
    # a closed one not.
    assert verify(parse(f"${gold}$"), parse(f"${answer}$")) is equal
