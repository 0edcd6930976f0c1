"""The reward of benchmarks.step_beside_trl: whether a response has an odd number of words. Any model gets some right."""

from collections.abc import Mapping
from typing import Any


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """Correct where the words are odd in number."""
    return len(response.split()) % 2 == 1
