"""The parts that continuous integration runs are, together, all long tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

FILES = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))


def items_of_slice(slice_name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of two tests each that are left, and that the others were reported as left out."""
    monkeypatch.setenv(conftest.SLICE, slice_name)
    out: list[Any] = []
    config: Any = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: out.extend(items))
    )
    items: list[Any] = [SimpleNamespace(path=Path("tests") / name) for name in FILES * 2]
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(out) == 2 * len(FILES)
    return [item.path.name for item in items]


@pytest.mark.parametrize("of", [1, 3, 4])
def test_each_file_is_in_one_slice(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [items_of_slice(f"{number + 1}/{of}", monkeypatch) for number in range(of)]
    assert sorted(name for part in parts for name in part) == sorted(FILES * 2)


def test_the_longest_files_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        left = items_of_slice(f"{number + 1}/3", monkeypatch)
        first = [name for name in dict.fromkeys(left) if name in conftest.LONGEST]
        assert first == [name for name in conftest.LONGEST[number::3] if name in FILES]
