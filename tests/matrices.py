"""A part of a matrix of cases for `make test`; `make test-full` runs the others."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def others_in_full(cases: Iterable[Any], in_test: Sequence[Any]) -> list[Any]:
    """All cases of a parametrized test, those that are not in `in_test` marked `full`. A case of
    several arguments is a tuple."""
    found = list(cases)
    unknown = [case for case in in_test if case not in found]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in in_test else _in_full(case) for case in found]


def _in_full(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)
