"""Right or wrong, by a parser of its own: shared by the check of an export and the comparison with
TRL, and independent of vapo_megatron's verifier."""

import re
from collections.abc import Mapping
from typing import Any

# Added to every problem.
SUFFIX = " Answer with the number."
# An expression at the end, such as `33 - 4`, restates the problem.
UNEVALUATED = re.compile(r"\d\s*[-+*/×·]\s*\d+\W*$")


def is_right(response: str, answer: str) -> bool:
    """Whether the last integer of the response is the answer, and is no operand of an expression
    that ends it."""
    numbers = re.findall(r"(?<![\d.])-?\d+(?![\d.]*\d)", response)
    return bool(numbers) and numbers[-1] == answer and not restates(response)


def restates(response: str) -> bool:
    """Whether the response ends in an expression that was not carried out."""
    return bool(UNEVALUATED.search(response))


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """`is_right` as a reward function of vapo_megatron."""
    return is_right(response, answer)
