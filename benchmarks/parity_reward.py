"""The reward of benchmarks.step_beside_trl: is the number of words odd? Any model gets some of
them."""

from collections.abc import Mapping
from typing import Any


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """Correct where the words are odd in number."""
    return len(response.split()) % 2 == 1
