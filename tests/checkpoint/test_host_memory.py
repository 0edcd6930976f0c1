"""The folder in host memory is a run's alone, and goes with the process that made it, however that
ended."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks

from vapo_megatron.checkpoint import checkpointer, state_saver
from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.checkpoint.checkpoints import list_checkpoints
from vapo_megatron.checkpoint.host_memory import (
    copies_left,
    host_memory,
    host_memory_of,
    job_memory,
)
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.checkpoint.state_saver import SavedRun, Snapshot, StateSaver
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.monitoring.recorder import Recorder


@pytest.fixture(autouse=True)
def root(shared_memory: Path) -> Path:
    return shared_memory


def killed_in(run_dir: Path) -> None:
    with host_memory(run_dir) as folder:
        assert folder is not None
        (folder / "copy").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_killed_processes_left_goes_at_the_next_start(root: Path, tmp_path: Path) -> None:
    for name in ("own", "other"):
        process = multiprocessing.get_context("fork").Process(
            target=killed_in, args=(tmp_path / name,)
        )
        process.start()
        process.join()
        assert host_memory_of(tmp_path / name).is_dir()
    with host_memory(tmp_path / "alive") as alive, host_memory(tmp_path / "own") as own:
        assert alive is not None and own == host_memory_of(tmp_path / "own")
        assert set(root.iterdir()) == {alive, own}, (
            "of the killed ones nothing is left, the live one's stays"
        )
        assert not (own / "copy").exists() and own.stat().st_mode & 0o077 == 0
        (tmp_path / "own" / "recorded_rollouts").mkdir(parents=True)
        (tmp_path / "own" / "recorded_rollouts" / "file").touch()
        assert (own / "recorded_rollouts" / "file").exists(), (
            "what a copy names of the run directory is found from it"
        )
    assert not list(root.iterdir()) and (tmp_path / "own" / "recorded_rollouts" / "file").exists()


def test_copies_of_a_killed_starter_are_taken_over(root: Path, tmp_path: Path) -> None:
    place = host_memory_of(tmp_path)
    assert copies_left(tmp_path) is None
    process = multiprocessing.get_context("fork").Process(target=killed_in, args=(tmp_path,))
    process.start()
    process.join()
    (place / "checkpoints" / "step_000003").mkdir(parents=True)
    assert copies_left(tmp_path) == place
    with host_memory(tmp_path, keep_copies=True) as folder:
        assert folder == place and (place / "checkpoints" / "step_000003").is_dir()
        assert (
            json.loads((place / "owner.json").read_text())["pid"] == os.getpid()
            and not (place / "copy").exists()
        )
    assert copies_left(tmp_path) is None
    place.symlink_to(tmp_path)
    assert copies_left(tmp_path) is None, "its name can be guessed, and its contents are trusted"


@pytest.mark.parametrize(
    "error", [BadInput("no such key"), RunFailed("a bug"), KeyboardInterrupt(), TryAgain("75")]
)
def test_the_only_copy_of_a_state_survives_a_failed_start(
    root: Path, tmp_path: Path, error: BaseException
) -> None:
    """And the start of another run meanwhile; once a checkpoint is as new it goes."""
    state = host_memory_of(tmp_path) / "checkpoints" / "step_000003"
    with pytest.raises(TryAgain), host_memory(tmp_path) as folder:
        assert folder is not None
        state.mkdir(parents=True)
        raise TryAgain("the disk refused it")
    with pytest.raises(type(error)), host_memory(tmp_path, keep_copies=True):
        process = multiprocessing.get_context("fork").Process(
            target=killed_in, args=(tmp_path / "other",)
        )
        process.start()
        process.join()
        assert (state.parents[1] / "kept").exists(), "also if this process is killed"
        raise error
    with host_memory(tmp_path / "other"):
        assert state.is_dir()
    with pytest.raises(type(error)), host_memory(tmp_path, keep_copies=True):
        (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
        raise error
    assert not list(root.iterdir())


def saves_and_is_killed(run_dir: Path) -> None:
    with host_memory(run_dir, keep_copies=True):
        (run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
        os._exit(1)


def test_state_already_on_disk_does_not_stay_in_memory(root: Path, tmp_path: Path) -> None:
    with pytest.raises(TryAgain), host_memory(tmp_path) as folder:
        assert folder is not None
        (folder / "checkpoints" / "step_000003").mkdir(parents=True)
        raise TryAgain("the disk refused it")
    process = multiprocessing.get_context("fork").Process(
        target=saves_and_is_killed, args=(tmp_path,)
    )
    process.start()
    process.join()
    assert host_memory_of(tmp_path).is_dir()
    with host_memory(tmp_path / "other") as other:
        assert set(root.iterdir()) == {other}


@pytest.mark.parametrize(
    "error", [TryAgain("a full disk"), OSError(errno.ESTALE, "Stale file handle")]
)
def test_a_disk_that_does_not_answer_takes_no_state_with_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whoever met it first: the ranks, or the process that started them."""
    is_dir = Path.is_dir

    def answered(path: Path) -> bool:
        if path == tmp_path / "checkpoints":
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", answered)
    with pytest.raises(type(error)), host_memory(tmp_path) as folder:
        assert folder is not None
        (folder / "checkpoints" / "step_000003").mkdir(parents=True)
        raise error
    assert copies_left(tmp_path) == folder and (folder / "kept").exists()


def test_a_run_that_failed_goes_on_from_its_checkpoint(root: Path, tmp_path: Path) -> None:
    """Not from a newer copy of what made it fail."""
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    with pytest.raises(RunFailed), host_memory(tmp_path) as folder:
        assert folder is not None
        (folder / "checkpoints" / "step_000003").mkdir(parents=True)
        raise RunFailed("an alarm")
    assert not list(root.iterdir())


def three_steps(
    run_dir: Path, memory: Path, after_first: Callable[[], None] = lambda: None
) -> tuple[list[str], list[int]]:
    """A run of three steps without models, with copies in memory: its red lines, and the steps of
    its checkpoints."""
    tree = {
        "model": {"path": "model"},
        "data": {"train": "unread.jsonl"},
        "sampling": {"max_new_tokens": 8},
    }
    config = TrainConfig.model_validate(tree)
    alarms = list[str]()
    with Recorder(run_dir, MonitoringConfig(tensorboard=False), is_main_rank=True) as recorder:
        recorder.console.alarm = alarms.append  # type: ignore[method-assign]
        saver = Checkpointer(
            config.checkpoint, SavedRun(config, "train", run_dir, {}, "run"), recorder, None, memory
        )
        for step in (1, 2, 3):
            saver.safe_point(Snapshot(Progress(step=step), {}), due=step == 3, last=False)
            saver.wait()
            if step == 1:
                after_first()
    return alarms, [name.step for name in list_checkpoints(run_dir)]


def copies_of(
    run_dir: Path, memory: Path, write: Callable[[], None], cores: int
) -> tuple[list[int], float]:
    """Steps of three whose copies are left where writing one does `write` on so many cores, and
    what the last one is counted as."""
    plain = StateSaver._write
    savers: list[StateSaver] = []

    def writing(saver: StateSaver, save: Any) -> Any:
        if saver._place == memory:
            write()
            savers.append(saver)
        return plain(saver, save)

    with (
        mock.patch.object(state_saver.os, "sched_getaffinity", lambda _: set(range(cores))),
        mock.patch.object(StateSaver, "_write", writing),
    ):
        three_steps(run_dir, memory)
        return [name.step for name in list_checkpoints(memory)], savers[-1].writing_seconds


def spin() -> None:
    end = time.thread_time() + 0.4
    while time.thread_time() < end:
        pass


def test_copies_are_rarer_where_writing_takes_the_cores(tmp_path: Path) -> None:
    """On two cores the engines lose what the writer takes; on 64 nobody misses it."""
    counted = {}
    for name, write, cores in (
        ("two", spin, 2),
        ("many", spin, 64),
        ("waits", partial(time.sleep, 0.4), 2),
    ):
        run_dir = tmp_path / name / "run"
        memory = tmp_path / name / "memory"
        run_dir.mkdir(parents=True)
        memory.mkdir()
        left, counted[name] = run_ranks(1, copies_of, run_dir, memory, write, cores)[0]
        if name == "two":
            assert left == [1], "0.2 seconds of both cores allow one copy in four seconds"
    assert counted["two"] >= 0.2
    assert counted["many"] < 0.05 and counted["waits"] < 0.1


def goes_on_without_its_folder(run_dir: Path, memory: Path) -> tuple[list[str], list[int]]:
    """Three steps, after the first of which the folder in host memory is removed."""

    def remove() -> None:
        assert [name.step for name in list_checkpoints(memory)] == [1]
        shutil.rmtree(memory)

    return three_steps(run_dir, memory, remove)


def goes_on_without_room(run_dir: Path, memory: Path) -> tuple[list[str], list[int]]:
    """Three steps on a machine with 32 MiB of memory left, and a reserve of 64."""
    available = SimpleNamespace(available=32 << 20)
    machine = SimpleNamespace(virtual_memory=lambda: available)
    with mock.patch.object(state_saver, "psutil", machine):
        return three_steps(run_dir, memory)


def goes_on_without_its_metrics(run_dir: Path, memory: Path) -> tuple[list[str], list[int]]:
    """Three steps, after the first of which metrics.jsonl cannot be read once."""
    read = Path.read_bytes
    answers: list[OSError] = []

    def read_or_refuse(path: Path) -> bytes:
        if path.name == "metrics.jsonl" and answers:
            raise answers.pop()
        return read(path)

    copies_each_step = mock.patch.object(checkpointer, "_COPYING_SHARE", 1e9)
    with copies_each_step, mock.patch.object(Path, "read_bytes", read_or_refuse):
        refusal = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return three_steps(run_dir, memory, lambda: answers.append(refusal))


def test_a_disk_that_cannot_be_read_once_fails_one_copy(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    memory = tmp_path / "memory"
    run_dir.mkdir()
    memory.mkdir()
    alarms, saved = run_ranks(1, goes_on_without_its_metrics, run_dir, memory)[0]
    assert alarms == [
        "no more copies in host memory (Stale file handle): a lost rank costs what follows the "
        "last checkpoint"
    ]
    assert saved == [3]


def test_a_copy_without_room_says_how_much_it_needs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    memory = tmp_path / "memory"
    run_dir.mkdir()
    memory.mkdir()
    alarms, saved = run_ranks(1, goes_on_without_room, run_dir, memory)[0]
    assert alarms == [
        "no more copies in host memory (0.06 GiB needed, 0.03 GiB free): a lost rank costs what "
        "follows the last checkpoint"
    ]
    assert saved == [3] and not list_checkpoints(memory)


def test_folder_removed_during_a_run_is_named_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    memory = tmp_path / "memory"
    run_dir.mkdir()
    memory.mkdir()
    alarms, saved = run_ranks(1, goes_on_without_its_folder, run_dir, memory)[0]
    assert alarms == [
        f"no more copies in host memory ({memory} was removed): a lost rank costs what follows the "
        "last checkpoint"
    ]
    assert saved == [3] and not memory.exists()


def test_a_jobs_folder_waits_for_the_next_attempt(root: Path, tmp_path: Path) -> None:
    own = root / "vapo-job-42.0.node"
    process = multiprocessing.get_context("fork").Process(
        target=job_memory, args=(tmp_path, True, job_on(own))
    )
    process.start()
    process.join()
    (own / "checkpoints").mkdir()
    assert host_memory_of(tmp_path, job_on(own)) == own and own.stat().st_mode & 0o077 == 0
    assert job_memory(tmp_path, False, job_on(own)) == own and (own / "checkpoints").is_dir()
    again = job_on(own) | {"VAPO_ATTEMPT": "1"}
    assert job_memory(tmp_path, True, again) == own and (own / "checkpoints").is_dir(), (
        "its own, by an earlier attempt"
    )
    with host_memory(tmp_path / "other"):
        assert own.is_dir(), "its job lives"
    process = multiprocessing.get_context("fork").Process(
        target=job_memory, args=(tmp_path, True, again)
    )
    process.start()
    process.join()
    with host_memory(tmp_path / "other"):
        assert own.is_dir(), "between two steps of its job"
    for path in (own / "checkpoints", own / "owner.json", own):
        os.utime(path, (time.time() - 1000,) * 2)
    with host_memory(tmp_path / "other"):
        assert not own.exists(), "its job has been gone for long"
    assert job_memory(tmp_path, True, {}) is None


def test_copies_of_another_run_of_the_job_are_not_used(root: Path, tmp_path: Path) -> None:
    own = root / "vapo-job-42.0.node"
    assert job_memory(tmp_path / "first", True, job_on(own)) == own
    (own / "checkpoints").mkdir()
    assert (
        job_memory(tmp_path / "second", True, job_on(own)) == own
        and not (own / "checkpoints").exists()
    )
    assert (own / "recorded_rollouts").readlink() == tmp_path / "second" / "recorded_rollouts"


def test_copies_from_before_the_job_was_requeued_go(root: Path, tmp_path: Path) -> None:
    """Slurm may have left no time to take them away; nothing resumes from them."""
    before, other, now = (
        root / f"vapo-job-{name}" for name in ("42.9.node", "43.0.node", "42.10.node.of.a.site")
    )
    for folder, job in ((before, {"SLURM_RESTART_COUNT": "9"}), (other, {"SLURM_JOB_ID": "43"})):
        assert job_memory(tmp_path, True, job_on(folder) | job) == folder
    assert job_memory(tmp_path, True, job_on(now) | {"SLURM_RESTART_COUNT": "10"}) == now
    assert sorted(root.iterdir()) == [now, other]


def test_a_jobs_folder_of_somebody_else_is_not_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (link := root / "vapo-job-42.0.link").symlink_to(tmp_path)
    (own := root / "vapo-job-42.0.node").mkdir()
    with caplog.at_level("WARNING", logger="vapo_megatron"):
        assert job_memory(tmp_path, True, job_on(link)) is None
        monkeypatch.setattr(os, "getuid", lambda: own.stat().st_uid + 1)
        assert job_memory(tmp_path, True, job_on(own)) is None and not list(own.iterdir())
    assert caplog.text.count("it is somebody else's") == 2


def job_on(folder: Path) -> dict[str, str]:
    return {"VAPO_HOST_MEMORY": str(folder), "SLURM_JOB_ID": "42"}


def test_without_host_memory_there_are_no_copies(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.rmdir()
    with (
        caplog.at_level("WARNING", logger="vapo_megatron"),
        host_memory(tmp_path / "run") as folder,
    ):
        assert folder is None
    assert "cannot be used (No such file or directory)" in caplog.text
