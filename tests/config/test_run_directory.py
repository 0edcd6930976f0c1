"""A run directory is made where there is room for it, and never takes the place of what is not a
run's."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from vapo_megatron.config.load import load_config
from vapo_megatron.config.run import RunPlace
from vapo_megatron.config.run_directory import (
    MARKER,
    check_folders,
    check_place,
    check_room,
    existing,
    make_run_dir,
)
from vapo_megatron.errors import BadInput

Usage = namedtuple("Usage", "total used free")
MIB = 1 << 20


def place(tmp_path: Path, overwrite: bool = False) -> RunPlace:
    return RunPlace(name="mine", root=str(tmp_path), overwrite=overwrite)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_directory_is_made_with_its_config_alone(tmp_path: Path) -> None:
    run = place(tmp_path / "deep" / "runs")
    made = make_run_dir(run, run)
    assert made == tmp_path / "deep" / "runs" / "mine"
    assert names(made) == {"config.yaml", MARKER} and names(made.parent) == {"mine"}
    assert load_config(RunPlace, made / "config.yaml", [], tmp_path) == run


def test_room_is_needed_for_results_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Usage:
        asked.append(folder)
        return Usage(0, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run_dir = tmp_path / "not" / "yet"
    free = 64 * MIB
    check_room(run_dir)
    with pytest.raises(BadInput):
        check_room(run_dir, 1)
    free = 64 * MIB - 1
    with pytest.raises(BadInput):
        check_room(run_dir)
    free = 1 << 30
    check_room(run_dir, (1 << 30) - 64 * MIB)
    with pytest.raises(BadInput) as refused:
        check_room(run_dir, 1 << 30)
    assert str(refused.value) == (
        f"run.root: {tmp_path} has 1.00 GiB free, the run needs at least 1.06 GiB: make room, or "
        "set run.root to another disk"
    )
    assert set(asked) == {tmp_path}


@pytest.mark.parametrize("allowed", [0, os.R_OK | os.W_OK, os.R_OK | os.X_OK])
def test_a_folder_that_may_not_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Root may write anywhere: the answer of the system is put in place."""
    monkeypatch.setattr(os, "access", lambda folder, mode: mode & allowed == mode)
    with pytest.raises(BadInput) as refused:
        check_room(tmp_path / "mine")
    assert str(refused.value) == (
        f"run.root: {tmp_path} cannot be written, so {tmp_path}/mine cannot be made: choose a "
        "folder that this user may write"
    )


def test_a_file_in_place_of_the_root_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").touch(mode=0o777)
    with pytest.raises(BadInput) as refused:
        check_room(tmp_path / "root" / "mine")
    assert str(refused.value) == (
        f"run.root: {tmp_path}/root is not a folder, so {tmp_path}/root/mine cannot be made: "
        "choose a folder that this user may write"
    )
    assert existing(tmp_path / "root" / "mine" / "logs") == tmp_path / "root"
    assert existing(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "name", [".", "checkpoints", "evaluation", "hf", "logs", "recorded_rollouts", "samples"]
)
@pytest.mark.parametrize("broken_link", [False, True])
def test_what_has_the_name_of_a_folder_is_named(
    tmp_path: Path, name: str, broken_link: bool
) -> None:
    run_dir = tmp_path / "mine"
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    if broken_link:
        path.symlink_to(tmp_path / "gone")
    else:
        path.touch()
    with pytest.raises(BadInput) as refused:
        check_place(place(tmp_path))
    assert str(refused.value) == (
        f"{path}: a file or a broken link, expected a folder of the run: move it away, or choose "
        "another run.name"
    )
    path.unlink()
    path.mkdir()
    check_folders(run_dir)


@pytest.mark.parametrize(
    ("files", "replaced"),
    [
        ([], True),
        ([MARKER], True),
        ([MARKER, "config.yaml", "environment.json", "mlflow_run_id", "metrics.jsonl"], True),
        ([MARKER, "logs/a", "samples/a", "tensorboard/a", "wandb/a"], True),
        (
            [
                MARKER,
                "config.yaml",
                "environment.json",
                "mlflow_run_id",
                "metrics.jsonl",
                "logs/a",
                "samples/a",
                "tensorboard/a",
                "wandb/a",
            ],
            True,
        ),
        (["config.yaml"], False),
        ([MARKER, "report.html"], False),
        ([MARKER, "notes.txt"], False),
        ([MARKER, "metrics.jsonl=x"], False),
    ],
)
def test_only_a_run_without_results_is_replaced_unasked(
    tmp_path: Path, files: list[str], replaced: bool
) -> None:
    (tmp_path / "mine").mkdir()
    for file in files:
        name, _, content = file.partition("=")
        path = tmp_path / "mine" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    before = names(tmp_path / "mine")
    run = place(tmp_path)
    if replaced:
        make_run_dir(run, run)
        assert names(tmp_path / "mine") == {"config.yaml", MARKER}
        return
    with pytest.raises(BadInput) as refused:
        make_run_dir(run, run)
    assert str(refused.value) == (
        f"run.name=mine: {tmp_path}/mine exists: choose another name, set run.resume=auto to "
        "continue it, or run.overwrite=true to replace it"
    )
    assert names(tmp_path / "mine") == before and names(tmp_path) == {"mine"}


def test_overwriting_takes_a_run_and_leaves_what_is_the_users(tmp_path: Path) -> None:
    run = place(tmp_path, overwrite=True)
    folder = make_run_dir(run, run)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model").touch()
    for name in ("checkpoints", "critic_probes", "evaluation", "hf", "logs", "profile"):
        (folder / name).mkdir()
        (folder / name / "content").touch()
    for name in ("evaluation.json", "report.html", "metrics.jsonl", "notes.txt", "abc"):
        (folder / name).touch()
    (folder / "recorded_rollouts").symlink_to(tmp_path / "elsewhere")
    make_run_dir(run, run, keeps_exports=True)
    assert names(folder) == {"config.yaml", MARKER, "hf", "notes.txt", "abc"}
    assert (folder / "hf" / "content").exists() and (tmp_path / "elsewhere" / "model").exists()
    make_run_dir(run, run)
    assert names(folder) == {"config.yaml", MARKER, "notes.txt", "abc"}
    assert names(tmp_path) == {"mine", "elsewhere"}


def test_overwriting_takes_nothing_that_no_run_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").touch()
    run = place(tmp_path, overwrite=True)
    with pytest.raises(BadInput) as refused:
        make_run_dir(run, run)
    assert str(refused.value) == (
        f"run.overwrite: {tmp_path}/mine is not a run directory (it has no .vapo_run): remove it "
        "yourself"
    )
    (tmp_path / "mine").rename(tmp_path / "other")
    (tmp_path / "other" / MARKER).touch()
    (tmp_path / "mine").symlink_to(tmp_path / "other")
    with pytest.raises(BadInput) as refused:
        make_run_dir(run, run)
    assert str(refused.value) == (
        f"run.overwrite: {tmp_path}/mine is a link: remove it yourself, or choose another name"
    )


def test_a_directory_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(BadInput) as refused:
            make_run_dir(run, run)
    told = "make room, or set run.root to another disk"
    reason = "No space left on device"
    assert str(refused.value) == f"run.root: {tmp_path}/mine cannot be made ({reason}): {told}"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(BadInput) as refused:
            make_run_dir(run, run)
    assert str(refused.value) == f"run.root: {tmp_path}/mine cannot be made ({reason}): {told}"
    assert names(tmp_path) == set(), "nothing is left"
