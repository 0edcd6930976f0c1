"""A verifier for models that know nothing: a response is correct where it has an even number of words."""

from collections.abc import Mapping
from typing import Any


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    return len(response.split()) % 2 == 0
