"""A verifier for models that know nothing: a response is correct where it has an even number of
words."""

import os
import signal
import zlib
from collections.abc import Mapping
from typing import Any


def verify(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    return len(response.split()) % 2 == 0


def verify_with_bombs(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """As verify; for some responses its process dies, or asks for more memory than it may."""
    kind = zlib.crc32(response.encode()) % 24
    if kind == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 1:
        bytearray(1 << 36)
    return verify(problem, answer, response, extra)


def first_word(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """Correct where the first word is an even digit: nothing behind it matters."""
    return response.split()[:1] in (["0"], ["2"], ["4"], ["6"], ["8"])


def length_score(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> float:
    """A score of 0 to 1 in which responses to a problem hardly ever agree."""
    return (len(response) % 17) / 16
