"""The tables of plans are what plans say now."""

from pathlib import Path

import pytest

from benchmarks import published

HALVES = ("fitted", "held out")


@pytest.mark.parametrize("path", published.TABLES, ids=lambda path: path.name)
def test_a_page_has_the_table_as_it_is_now(path: Path) -> None:
    assert path.read_text() == published.page(path), "python -m benchmarks.published --write"


def test_eight_published_rows_have_a_length_and_a_source() -> None:
    halves = [
        [row for row in published.table().splitlines() if f"| published, {half} |" in row]
        for half in HALVES
    ]
    assert [len(rows) for rows in halves] == [4, 4], (
        "a constant is fitted to one half, the other is the test of it"
    )
    assert all("](https://" in row for rows in halves for row in rows)
