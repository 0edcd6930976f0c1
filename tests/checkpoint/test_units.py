"""Units are found by looking, committed at once, and let go by the rules of retention alone."""

from pathlib import Path

import pytest

from vapo_megatron.checkpoint.units import (
    UnitName,
    best_unit,
    commit_unit,
    newest_unit,
    open_unit,
    remove_leftovers,
    remove_unit,
    to_remove,
    units,
)
from vapo_megatron.config.checkpoint import RetentionConfig


def save(run_dir: Path, name: UnitName) -> Path:
    folder = open_unit(run_dir, name)
    (folder / "file").write_text(str(name))
    return commit_unit(folder, name)


def test_names_sort_as_the_run_lives() -> None:
    life = [
        UnitName(0, 1),
        UnitName(0, 2),
        UnitName(0, 12),
        UnitName(0),
        UnitName(1),
        UnitName(12),
        UnitName(1_000_000),
    ]
    assert sorted(reversed(life)) == life
    assert [UnitName.parse(str(name)) for name in life] == life
    assert UnitName.parse(".step_000001.ab12") is UnitName.parse("step_1") is UnitName.parse("notes") is None


def test_what_is_not_committed_is_never_found_and_is_cleaned_up(tmp_path: Path) -> None:
    assert newest_unit(tmp_path) is None
    first = save(tmp_path, UnitName(2))
    half = open_unit(tmp_path, UnitName(3))
    (half / "file").write_text("half")
    assert newest_unit(tmp_path) == first
    remove_leftovers(tmp_path)
    assert list((tmp_path / "state").iterdir()) == [first]


def test_a_unit_that_cannot_be_committed_leaves_the_others(tmp_path: Path) -> None:
    first = save(tmp_path, UnitName(2))
    again = open_unit(tmp_path, UnitName(2))
    with pytest.raises(OSError):
        commit_unit(again, UnitName(2))
    assert units(tmp_path) == {UnitName(2): first}
    assert (first / "file").read_text() == "step_000002"


def test_removing_takes_the_name_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path, UnitName(step)) for step in (1, 2)]
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before anything is deleted
    remove_unit(paths[0])
    assert list(units(tmp_path).values()) == [paths[1]]


NAMES = [UnitName(0, 4), UnitName(0), *(UnitName(step) for step in (10, 20, 30, 40, 50))]


@pytest.mark.parametrize(
    "config,kept",
    [
        (RetentionConfig(last=2), [40, 50]),
        (RetentionConfig(last=1, every=20), [20, 40, 50]),
        (RetentionConfig(last=1, best="evaluation/a"), [20, 50]),
        (RetentionConfig(last=1, best="evaluation/a", best_is="lowest"), [30, 50]),
        (RetentionConfig(last=1, best="evaluation/absent"), [50]),
        (RetentionConfig(last=1, every=20, best="evaluation/a", best_is="lowest"), [20, 30, 40, 50]),
        (RetentionConfig(last=9), [0, 0, 10, 20, 30, 40, 50]),
    ],
)
def test_retention(config: RetentionConfig, kept: list[int]) -> None:
    values = {10: 0.5, 20: 0.7, 30: 0.2, 40: 0.7}
    figures = {UnitName(step): {"evaluation/a": value} for step, value in values.items()}
    gone = to_remove(list(reversed(NAMES)), figures, config)
    assert [name.step for name in NAMES if name not in gone] == kept


def test_of_equals_the_earliest_is_the_best() -> None:
    figures = {UnitName(20): {"a": 1.0}, UnitName(10): {"a": 1.0}, UnitName(30): {"b": 2.0}}
    assert best_unit(figures, RetentionConfig(best="a")) == UnitName(10)
