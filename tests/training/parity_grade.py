"""A verifier for models that know nothing: a response is correct where it has an even number of words."""

from collections.abc import Mapping
from typing import Any


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    return len(response.split()) % 2 == 0


def first_word(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """Correct where the first word is an even digit: nothing behind it matters."""
    return response.split()[:1] in (["0"], ["2"], ["4"], ["6"], ["8"])
