"""The tables of plans are what plans say now, and they add up."""

from pathlib import Path

import pytest

from benchmarks import published


@pytest.mark.parametrize("path", published.TABLES, ids=lambda path: path.name)
def test_a_page_has_the_table_as_it_is_now(path: Path) -> None:
    assert path.read_text() == published.page(path), "python -m benchmarks.published --write"


def test_there_are_eight_published_rows_with_a_length_each_with_its_source() -> None:
    rows = [line for line in published.table().splitlines() if "| published, " in line]
    assert len(rows) >= 8 and all("](https://" in row for row in rows)


def test_a_row_of_the_aime_table_adds_up() -> None:
    for row in published.aime_table().splitlines()[2:]:
        *parts, step, _ = [cell.strip() for cell in row.strip("|").split("|")[4:]]
        assert sum(map(int, parts)) == int(step)
