"""Checkpoints are found by looking, committed at once, and let go by the rules of retention
alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vapo_megatron import files
from vapo_megatron.checkpoint.checkpoints import (
    CheckpointName,
    best_checkpoint,
    commit_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
    remove_checkpoint,
    remove_leftovers,
    to_remove,
)
from vapo_megatron.config.run import RetentionConfig


def save(run_dir: Path, name: CheckpointName) -> Path:
    folder = open_checkpoint(run_dir, name)
    (folder / "file").write_text(str(name))
    return commit_checkpoint(folder, name)


def test_names_sort_as_the_run_lives() -> None:
    life = [
        CheckpointName(0, 1),
        CheckpointName(0, 2),
        CheckpointName(0, 12),
        CheckpointName(0),
        CheckpointName(1),
        CheckpointName(12),
        CheckpointName(1_000_000),
    ]
    assert sorted(reversed(life)) == life
    assert [CheckpointName.parse(str(name)) for name in life] == life
    assert (
        CheckpointName.parse(".step_000001.ab12")
        is CheckpointName.parse("step_1")
        is CheckpointName.parse("notes")
        is None
    )


def test_what_is_not_committed_is_never_found_and_is_cleaned_up(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    first = save(tmp_path, CheckpointName(2))
    half = open_checkpoint(tmp_path, CheckpointName(3))
    (half / "file").write_text("half")
    assert latest_checkpoint(tmp_path) == first
    remove_leftovers(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [first]


def test_a_unit_that_cannot_be_committed_leaves_the_others(tmp_path: Path) -> None:
    first = save(tmp_path, CheckpointName(2))
    again = open_checkpoint(tmp_path, CheckpointName(2))
    again.rmdir()  # as a file system that refuses to rename it
    with pytest.raises(OSError):
        commit_checkpoint(again, CheckpointName(2))
    assert list_checkpoints(tmp_path) == {CheckpointName(2): first}
    assert (first / "file").read_text() == "step_000002"


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the file system can exchange two names: NFS and Lustre cannot."""

    def set_ability(able: bool) -> None:
        if not able:
            monkeypatch.setattr(files, "exchanged", lambda *_: False)

    return set_ability


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_newer_unit_replaces_one_of_its_name(
    can_exchange: bool, tmp_path: Path, exchanges: Callable[[bool], None]
) -> None:
    exchanges(can_exchange)
    first = save(tmp_path, CheckpointName(2))
    again = open_checkpoint(tmp_path, CheckpointName(2))
    (again / "file").write_text("newer")
    assert commit_checkpoint(again, CheckpointName(2)) == first
    assert (first / "file").read_text() == "newer" and list(first.parent.iterdir()) == [first]


def test_checkpoint_about_to_be_replaced_is_found_after_a_kill(
    tmp_path: Path, exchanges: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges(False)
    first = save(tmp_path, CheckpointName(2))
    (first / "file").write_text("older")
    rename = Path.rename

    def killed_after_it(path: Path, target: Path) -> Path:
        rename(path, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed_after_it)
        commit_checkpoint(open_checkpoint(tmp_path, CheckpointName(2)), CheckpointName(2))
    assert not list_checkpoints(tmp_path)
    remove_leftovers(tmp_path)
    assert list(list_checkpoints(tmp_path).values()) == [first] == list(first.parent.iterdir())
    assert (first / "file").read_text() == "older"


def test_removing_takes_the_name_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [save(tmp_path, CheckpointName(step)) for step in (1, 2)]
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before anything is deleted
    remove_checkpoint(paths[0])
    assert list(list_checkpoints(tmp_path).values()) == [paths[1]]


NAMES = [
    CheckpointName(0, 4),
    CheckpointName(0),
    *(CheckpointName(step) for step in (10, 20, 30, 40, 50)),
]


@pytest.mark.parametrize(
    "config,kept",
    [
        (RetentionConfig(last=2), [40, 50]),
        (RetentionConfig(last=1, every=20), [20, 40, 50]),
        (RetentionConfig(last=1, best="evaluation/a"), [20, 50]),
        (RetentionConfig(last=1, best="evaluation/absent"), [50]),
        (RetentionConfig(last=1, every=30, best="evaluation/a"), [20, 30, 50]),
        (RetentionConfig(last=9), [0, 0, 10, 20, 30, 40, 50]),
    ],
)
def test_retention(config: RetentionConfig, kept: list[int]) -> None:
    values = {10: 0.5, 20: 0.7, 30: 0.2, 40: 0.7}
    metrics = {CheckpointName(step): {"evaluation/a": value} for step, value in values.items()}
    gone = to_remove(list(reversed(NAMES)), metrics, config)
    assert [name.step for name in NAMES if name not in gone] == kept


def test_of_equals_the_earliest_is_the_best() -> None:
    metrics = {
        CheckpointName(20): {"a": 1.0},
        CheckpointName(10): {"a": 1.0},
        CheckpointName(30): {"b": 2.0},
    }
    assert best_checkpoint(metrics, RetentionConfig(best="a")) == CheckpointName(10)
