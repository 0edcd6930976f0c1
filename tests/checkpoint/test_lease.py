"""Two live runs never share a run directory, and one that is gone is in nobody's way."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron import logs
from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.errors import BadInput

FORK = multiprocessing.get_context("fork")


def hold(run_dir: Path, environment: dict[str, str], told: Any) -> None:
    with Lease(run_dir, environment, beat=0.1) as lease:
        lease.take()
        told.send(True)
        time.sleep(300)


@contextmanager
def holder(run_dir: Path, **environment: str) -> Iterator[Any]:
    """Another process that has taken the lease."""
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(run_dir, environment, writer))
    process.start()
    assert reader.poll(60) and reader.recv()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def lease_file(run_dir: Path) -> Path:
    return run_dir.with_name(f".{run_dir.name}.lease")


def seem_elsewhere(run_dir: Path) -> None:
    """Have the holder be on a machine whose processes are not seen from here."""
    path = lease_file(run_dir)
    touched = path.stat()
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"machine": "another", "host": "node7"})
    )
    os.utime(path, (touched.st_atime, touched.st_mtime))


def test_a_live_run_is_named_and_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "vapo"
    with holder(run_dir, SLURM_JOB_ID="77") as other, Lease(run_dir, {}) as lease:
        before = lease_file(run_dir).read_text()
        with pytest.raises(
            BadInput,
            match=rf"process {other.pid} on \S+ \(job 77\) works in it, last sign of life \d+ s",
        ):
            lease.take()
        assert lease_file(run_dir).read_text() == before
    assert lease_file(run_dir).exists(), "released by one who did not hold it"


def test_after_kill_9_on_this_machine_nobody_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure(logs.LogLevel.WARNING)
    with holder(tmp_path / "vapo") as other:
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    assert lease_file(tmp_path / "vapo").exists()
    with Lease(tmp_path / "vapo", {}, stale=3600) as lease:
        lease.take()
        assert f"taken over from process {other.pid}" in capfd.readouterr().err
    assert not list(tmp_path.iterdir()), "something stays behind"


def test_process_of_another_life_with_the_same_pid_is_not_owner(tmp_path: Path) -> None:
    path = lease_file(tmp_path / "vapo")
    with Lease(tmp_path / "vapo", {}) as lease:
        lease.take()
        content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"born": content["born"] - 1}))
    with Lease(tmp_path / "vapo", {}, stale=3600) as lease:
        lease.take()


@pytest.mark.parametrize("later", ["SLURM_RESTART_COUNT", "VAPO_ATTEMPT"])
def test_a_requeued_job_takes_over_from_its_earlier_try(later: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "vapo"
    with holder(run_dir, SLURM_JOB_ID="77") as other:
        other.kill()
        other.join()
    seem_elsewhere(run_dir)
    with Lease(run_dir, {"SLURM_JOB_ID": "77", later: "1"}, stale=3600) as lease:
        lease.take()


def test_of_another_machine_a_sign_of_life_is_waited_for(tmp_path: Path) -> None:
    run_dir = tmp_path / "vapo"
    with Lease(run_dir, {}, beat=3600) as first:
        first.take()
        seem_elsewhere(run_dir)
        alive = threading.Timer(0.5, os.utime, [lease_file(run_dir)])
        alive.start()
        with (
            Lease(run_dir, {}, beat=0.4, stale=3600) as second,
            pytest.raises(BadInput, match=r"on node7 works in it"),
        ):
            second.take()
    assert lease_file(run_dir).exists()


def test_without_a_sign_of_life_it_is_taken_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure(logs.LogLevel.WARNING)
    run_dir = tmp_path / "vapo"
    with holder(run_dir) as other:
        other.kill()
        other.join()
    seem_elsewhere(run_dir)
    with Lease(run_dir, {}, beat=0.4, stale=0.5) as lease:
        lease.take()
        assert "taken over from process" in capfd.readouterr().err
        with pytest.raises(BadInput, match="works in it"), Lease(run_dir, {}) as late:
            late.take()


def test_of_many_that_find_a_dead_one_one_takes_over(tmp_path: Path) -> None:
    run_dir = tmp_path / "vapo"
    with holder(run_dir) as other:
        other.kill()
        other.join()
    started = FORK.Event()
    done = FORK.Event()
    answers = FORK.SimpleQueue()
    rivals = [
        FORK.Process(target=compete, args=(run_dir, started, done, answers)) for _ in range(6)
    ]
    for rival in rivals:
        rival.start()
    started.set()
    got = [answers.get() for _ in rivals]
    done.set()
    for rival in rivals:
        rival.join()
    assert sorted(got) == [False] * 5 + [True]
    assert not list(tmp_path.iterdir())


def compete(run_dir: Path, started: Any, done: Any, answers: Any) -> None:
    started.wait(60)
    with Lease(run_dir, {}) as lease:
        try:
            lease.take()
            answers.put(True)
        except BadInput:
            answers.put(False)
        done.wait(60)


def test_it_shows_signs_of_life_until_it_is_let_go(tmp_path: Path) -> None:
    run_dir = tmp_path / "vapo"
    with pytest.raises(KeyboardInterrupt), Lease(run_dir, {}, beat=0.05) as lease:
        lease.take()
        os.utime(lease_file(run_dir), (0, 0))
        deadline = time.monotonic() + 120
        while lease_file(run_dir).stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise KeyboardInterrupt
    assert not lease_file(run_dir).exists()


def test_disk_lost_at_the_end_does_not_fail_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with Lease(tmp_path / "runs" / "vapo", {}) as lease:
        lease.take()
        monkeypatch.setattr(Path, "open", refuse)


def test_two_names_of_a_directory_are_one_lease(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with (
        holder(tmp_path / "disk" / "vapo"),
        Lease(tmp_path / "link" / "vapo", {}) as lease,
        pytest.raises(BadInput, match="works in it"),
    ):
        lease.take()
    here = host_memory_of(tmp_path / "disk" / "vapo", {})
    assert here == host_memory_of(tmp_path / "link" / "vapo", {})


def test_a_lease_that_is_removed_is_made_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "vapo"
    ended = threading.Event()
    with Lease(run_dir, {}, beat=0.02, end_run=ended.set) as lease:
        lease.take()
        lease_file(run_dir).unlink()
        deadline = time.monotonic() + 120
        while not lease_file(run_dir).exists() or not lease_file(run_dir).read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not ended.is_set()
        other = json.loads(lease_file(run_dir).read_text()) | {"pid": 1, "host": "elsewhere"}
        lease_file(run_dir).write_text(json.dumps(other))
        assert ended.wait(60), "two runs would write here"


def lose_it(run_dir: Path, interrupt: Any) -> None:
    """Another run takes it over while this one goes on. interrupt: how SIGINT is handled."""
    signal.signal(signal.SIGINT, interrupt)
    with Lease(run_dir, {}, beat=0.02) as lease:
        lease.take()
        path = lease_file(run_dir)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1}))
        time.sleep(300)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_that_lost_it_ends_also_in_the_background(tmp_path: Path, interrupt: Any) -> None:
    """A script's `command &` ignores SIGINT."""
    process = FORK.Process(target=lose_it, args=(tmp_path / "vapo", interrupt))
    process.start()
    try:
        process.join(30)
        assert process.exitcode not in (None, 0), "two runs write here"
    finally:
        process.kill()
        process.join()
