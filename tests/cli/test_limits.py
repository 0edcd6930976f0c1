"""What the system allows too little of is refused in one line before anything starts."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import CONFIGS, Command, Ranks, assert_refused
from tiny_runs import train_config, write_config

from vapo_megatron.checks import limits, preflight
from vapo_megatron.config.run_directory import MARKER

ROOT = Path(__file__).parents[2]


@contextmanager
def limited(kind: int, soft: int, hard: int | None = None) -> Iterator[None]:
    """The limit holds for this process; only a soft one can be taken back."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1] if hard is None else hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


# The tiny model has 62,976 weights in float32: 0.24 MiB, and 0.96 MiB with its optimizer's state,
# which two ranks write in four files.
@pytest.mark.parametrize("check", [[], ["--check"]])
@pytest.mark.parametrize(
    ("kib", "named"),
    [(0, "0.0 MiB"), (64, "0.1 MiB"), (245, "0.2 MiB")],
)
def test_files_that_may_not_grow_are_named_with_the_need(
    command: Command, capsys: pytest.CaptureFixture[str], check: list[str], kib: int, named: str
) -> None:
    config = write_config(
        command.folder / "config.yaml", train_config(command.folder, command.model)
    )
    with limited(resource.RLIMIT_FSIZE, kib << 10):
        code = command.exit_code("train", *check, config=config)
    said = f"lets files grow to {named} (ulimit -f), expected 0.2 MiB or more"
    assert_refused(command, code, capsys.readouterr().err, said, "`ulimit -f unlimited`")


def test_the_largest_file_decides(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank alone writes its half of the checkpoint into each of two files."""
    content = train_config(command.folder, command.model)
    content |= {"cluster": {"ranks": 1}, "actor": {}, "critic": {}}
    config = write_config(command.folder / "config.yaml", content)
    with limited(resource.RLIMIT_FSIZE, 400 << 10):
        code = command.exit_code("train", config=config)
    named = ["0.4 MiB", "expected 0.5 MiB", "checkpoint of the "]
    assert_refused(command, code, capsys.readouterr().err, *named)


def test_files_as_large_as_needed_are_allowed(command: Command, ranks: Ranks) -> None:
    ranks.may_start()
    config = write_config(
        command.folder / "config.yaml", train_config(command.folder, command.model)
    )
    with limited(resource.RLIMIT_FSIZE, 250 << 10):
        assert command.exit_code("train", config=config) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_too_few_open_files_are_bad_input(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    true_limit = resource.getrlimit

    def few(kind: int) -> tuple[int, int]:
        return (64, 64) if kind == resource.RLIMIT_NOFILE else true_limit(kind)

    monkeypatch.setattr(resource, "getrlimit", few)
    code = command.exit_code(name)
    assert_refused(
        command, code, capfd.readouterr().err, "allows 64 open files (ulimit -Hn), expected 256"
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"f_bavail": 16}, ["has 0.1 MiB free, the run needs at least 4 MiB", "--shm-size"]),
        ({"f_favail": 3}, ["has room for 3 more files (df -i)", "at least 128"]),
    ],
)
def test_shared_memory_that_is_full_is_refused(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, int],
    named: list[str],
) -> None:
    _full(monkeypatch, changed)
    code = command.exit_code("train", "--check")
    assert_refused(command, code, capfd.readouterr().err, "/dev/shm", *named)


def test_engines_of_two_ranks_need_room_for_their_queues(
    command: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _full(monkeypatch, {"f_bavail": 2048})  # 8 MiB
    with pytest.raises(limits.BadInput, match=r"8\.0 MiB free, the run needs at least 52 MiB"):
        limits.check_shared_memory(engines=1, tp=2)
    limits.check_shared_memory(engines=1, tp=1)


def test_shared_memory_without_limits_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs mounted with size=0,nr_inodes=0 says that it has none of either."""
    _full(monkeypatch, dict.fromkeys(("f_blocks", "f_bavail", "f_files", "f_favail"), 0))
    limits.check_shared_memory(engines=8, tp=2)


def test_small_copies_of_the_state_are_a_caution(
    command: Command,
    ranks: Ranks,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda *_: 1 << 50)
    ranks.may_start()
    assert command.exit_code("train") == 0
    said = capfd.readouterr().err
    assert "caution: /dev/shm has" in said and "set cluster.restarts=0" in said
    assert command.exit_code("train", "run.name=b", "cluster.restarts=0") == 0
    assert "caution" not in capfd.readouterr().err


def _full(monkeypatch: pytest.MonkeyPatch, changed: dict[str, int]) -> None:
    names = [name for name in dir(os.statvfs_result) if name.startswith("f_")]
    true_state = os.statvfs

    class State:
        def __init__(self, path: os.PathLike[str]) -> None:
            state = true_state(path)
            for name in names:
                setattr(self, name, getattr(state, name))
            if Path(path) == limits.SHARED_MEMORY:
                for name, value in {"f_frsize": 4096, **changed}.items():
                    setattr(self, name, value)

    monkeypatch.setattr(os, "statvfs", State)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mounted", "named"),
    [("size=64k", "MiB free, the run needs"), ("nr_inodes=3", "room for 2 more files")],
)
def test_a_real_shared_memory_that_is_small(command: Command, mounted: str, named: str) -> None:
    apart = ["unshare", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o {mounted} tmpfs /dev/shm"
    tried = subprocess.run([*apart, "sh", "-c", mount], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"this user may not mount: {tried.stderr.strip()}")
    config = write_config(
        command.folder / "config.yaml", train_config(command.folder, command.model)
    )
    program = f'{mount} && exec "$0" -m vapo_megatron train --check {config}'
    ended = subprocess.run(
        [*apart, "sh", "-c", program, sys.executable],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert_refused(command, ended.returncode, ended.stderr, "/dev/shm", named)


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", [".", "logs", "checkpoints", "hf", "samples"])
def test_a_file_in_place_of_a_folder_of_the_run(
    command: Command, capfd: pytest.CaptureFixture[str], name: str, resume: str
) -> None:
    place = command.run_dir / name
    place.parent.mkdir(parents=True)
    if name != ".":
        (command.run_dir / MARKER).touch()
    place.write_text("mine")
    code = command.exit_code("train", f"run.resume={resume}")
    error = capfd.readouterr().err
    assert code == 2 and error.count("\n") == 1, error
    assert f"{place}: a file or a broken link, expected a folder" in error
    assert place.read_text() == "mine"
