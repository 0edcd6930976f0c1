"""The parts that continuous integration runs are, together, all long tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slices import LONGEST, in_order

FILES = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))


def files_of_slice(slice_name: str) -> list[str]:
    """The files of what is left of two tests of each, in order."""
    items: list[Any] = [SimpleNamespace(path=Path("tests") / name) for name in FILES * 2]
    left_out = in_order(items, slice_name)
    assert len(items) + len(left_out) == 2 * len(FILES)
    return [item.path.name for item in items]


@pytest.mark.parametrize("of", [1, 3, 4])
def test_each_file_is_in_one_slice(of: int) -> None:
    parts = [files_of_slice(f"{number + 1}/{of}") for number in range(of)]
    assert sorted(name for part in parts for name in part) == sorted(FILES * 2)


def test_the_longest_files_take_turns() -> None:
    for number in range(3):
        left = files_of_slice(f"{number + 1}/3")
        first = [name for name in dict.fromkeys(left) if name in LONGEST]
        assert first == [name for name in LONGEST[number::3] if name in FILES]
