"""A stopped rank is named by the others, and the job ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from vapo_megatron import logs
from vapo_megatron.config.run import HangsConfig
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.megatron.mesh import group_timeout
from vapo_megatron.monitoring.timers import PhaseTimer
from vapo_megatron.run.ranks import end_from_thread, start_ranks
from vapo_megatron.run.watchdog import Heartbeat, Watchdog, describe

LIMITS = HangsConfig(floor_s=6.0)  # beside other tests a rank may get no core for two seconds


def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    def body() -> None:
        Watchdog(LIMITS, tmp_path, dist.get_rank(), dist.get_world_size(), 60, end_from_thread)
        timer = PhaseTimer()
        for step in range(8):
            with timer("update"):
                time.sleep(0.15)
                if step == 6 and dist.get_rank() == 1:
                    time.sleep(1.0)  # for a heartbeat in this phase
                    os.kill(os.getpid(), signal.SIGSTOP)
                dist.barrier()
            with timer("sync"):
                time.sleep(0.15)

    begin = time.monotonic()
    with pytest.raises(
        TryAgain, match=r"rank 1 \(silent since its phase update\) did not arrive; ranks 0, 2 wait"
    ):
        start_ranks(3, body, 300)
    assert time.monotonic() - begin < 60
    stacks = {path.name: path.read_text() for path in tmp_path.glob("hang_*.txt")}
    assert stacks and all("test_watchdog.py" in text for text in stacks.values())
    for text in stacks.values():
        # Collectives of earlier tests' groups in this process are in the record, which forked ranks
        # inherit.
        barriers = [
            line
            for line in text.splitlines()
            if "default_pg" in line and line.endswith(("over", "OVER"))
        ]
        assert [line.partition(" of group")[0] for line in barriers] == [
            f"gloo:barrier number {number}" for number in range(1, 8)
        ], text
        assert [
            line for line in text.splitlines() if line.endswith("NOT OVER")
        ] == text.splitlines()[-1:]


def test_a_rank_that_is_started_late_has_all_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forked from a process that has been in no phase for hours."""
    monkeypatch.setattr(logs, "_phase", logs.PhaseNow(logs.NO_PHASE, 0, time.monotonic() - 10_000))
    told: list[VapoError] = []
    begin = time.monotonic()
    watchdog = Watchdog(LIMITS, tmp_path, 0, 1, 1.0, told.append)
    while not told and time.monotonic() < begin + 30:
        time.sleep(0.02)
    watchdog.close()
    assert told and time.monotonic() - begin >= 1.0, "its own second"


def test_a_rank_in_another_phase_than_the_others_is_named() -> None:
    beats = [
        Heartbeat(0, "rollout", 4, 1.0, 9.9),
        *(Heartbeat(r, "broadcast", 3, 1.0, 10.0) for r in (1, 2)),
    ]
    said = describe(beats, 3, patience=1.0)
    assert (
        said
        == "rank 0 (in the phase rollout) did not arrive; ranks 1, 2 wait in the phase broadcast"
    )
    assert describe(beats[1:], 3, 1.0).startswith("rank 0 (silent) did not arrive")


def test_a_rank_that_says_nothing_hangs_in_whatever_phase(tmp_path: Path) -> None:
    """The others may be in a rollout for hours. One that is done need say no more."""
    limits = HangsConfig(floor_s=1.5)
    errors: dict[str, list[VapoError]] = {
        "both say something": [],
        "one is done": [],
        "one is silent": [],
    }
    folders = {name: tmp_path / name for name in errors}
    logs.set_phase("rollout")
    first = {
        name: Watchdog(limits, folders[name], 0, 2, 60, errors[name].append) for name in errors
    }
    second, done = (
        Watchdog(limits, folders[name], 1, 2, 60, errors[name].append)
        for name in ("both say something", "one is done")
    )
    done.close()
    silent = Heartbeat(1, "sync", 4, 1.0, time.time())
    (folders["one is silent"] / "heartbeat_00001.json").write_text(json.dumps(asdict(silent)))
    begin = time.monotonic()
    while not errors["one is silent"] and time.monotonic() < begin + 30:
        time.sleep(0.02)
    assert 1.0 < time.monotonic() - begin < 30
    time.sleep(max(0.0, begin + 2.5 - time.monotonic()))
    for watchdog in (*first.values(), second):
        watchdog.close()
    logs.set_phase(None)
    assert not errors["both say something"] and not errors["one is done"]
    message = str(errors["one is silent"][0])
    assert re.search(
        r"rank 1 \(silent since its phase sync\).* rank 1 has said nothing for \d s", message
    )


def test_a_slow_disk_does_not_slow_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Watchdog._beat
    told = list[VapoError]()

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        beat(*args)

    monkeypatch.setattr(Watchdog, "_beat", slow)
    watcher = Watchdog(HangsConfig(floor_s=6.0), tmp_path, 0, 1, 1.0, told.append)
    begin = time.monotonic()
    while not told and time.monotonic() < begin + 8:  # of a phase that may take 1 s; it took 11
        time.sleep(0.02)
    watcher.close()
    assert told, "the seconds of its writes count"


# Phase, seconds that it is watched for at most, whether it gets further, and the report about it.
PLACES: list[tuple[str | None, float, bool, str | None]] = [
    ("rollout", 2.5, False, None),
    ("evaluation", 2.5, False, None),
    ("weight_sync", 1.6, False, None),  # engines may be starting
    ("weight_sync", 30.0, False, r"limit 2 s"),
    (None, 30.0, False, r"limit 1 s"),
    ("update_policy", 2.5, True, None),
    ("update_policy", 30.0, False, r"got no further in the phase update_policy .*limit 1 s"),
]


def told_of(folder: Path) -> str | None:
    """A separate watchdog's report of this rank's place."""
    phase, seconds, gets_further, _ = PLACES[dist.get_rank()]
    errors = list[VapoError]()
    timer = PhaseTimer()
    logs.set_phase(None)
    watchdog = Watchdog(
        HangsConfig(floor_s=1.0), folder / str(dist.get_rank()), 0, 1, 60, errors.append
    )
    end = time.monotonic() + seconds
    with timer(phase) if phase is not None else nullcontext():
        while time.monotonic() < end and not errors:
            time.sleep(0.1)
            if gets_further:
                logs.note_progress()
    watchdog.close()
    return str(errors[0]) if errors else None


def test_only_waits_for_engines_may_take_longest_time_at_first(tmp_path: Path) -> None:
    """An update that gets no further is told of within minutes, as is the time between phases; an
    update that does, and responses that engines write, are waited for."""
    for (*place, expected), message in zip(
        PLACES, run_ranks(len(PLACES), told_of, tmp_path), strict=True
    ):
        if expected is None:
            assert message is None, place
        else:
            assert message is not None and re.search(expected, message), place


def test_ranks_wait_for_engines_as_long_as_rank_0_does(tmp_path: Path) -> None:
    """It alone is in a phase of its step while they generate."""
    engines = EnginePool.__new__(EnginePool)
    engines._user = SimpleNamespace()
    engines._resync = None  # type: ignore[assignment]

    def body() -> None:
        Watchdog(HangsConfig(floor_s=3.0), tmp_path, dist.get_rank(), 2, 60, end_from_thread)
        timer = PhaseTimer()
        with engines.rank0_uses_engines():
            if dist.get_rank() == 0:
                with timer("rollout"):
                    time.sleep(5.0)
        assert logs.phase_now().phase == logs.NO_PHASE

    start_ranks(2, body, 300)


def test_ranks_outwait_a_collective_while_rank_0_waits() -> None:
    """A rollout may take longer than a collective: rank 0 keeps calling the others meanwhile."""

    def body() -> None:
        user: Any = SimpleNamespace()
        engines = EnginePool.__new__(EnginePool)
        engines._user = user
        engines._resync = None
        with engines.rank0_uses_engines():
            end = time.monotonic() + 5.0
            while dist.get_rank() == 0 and time.monotonic() < end:
                user.on_wait()
                time.sleep(0.1)

    start_ranks(2, body, 2)


def test_groups_of_nccl_wait_no_longer_than_an_update_may_hang() -> None:
    def body() -> None:
        assert group_timeout("gloo").total_seconds() == 10800
        assert group_timeout("nccl").total_seconds() == 900

    start_ranks(1, body, 10800)


SUSPENDED = """
import sys, time
from pathlib import Path
from vapo_megatron.run.watchdog import Watchdog
from vapo_megatron.config.run import HangsConfig

told = []
Watchdog(HangsConfig(floor_s=9.0), Path(sys.argv[1]), 0, 1, 3.0, told.append)
print("watching", flush=True)
input()
time.sleep(1.0)
sys.exit(str(told[0]) if told else 0)
"""


@pytest.mark.full
def test_a_job_that_was_suspended_has_not_hung_meanwhile(tmp_path: Path) -> None:
    """As `scontrol suspend` and `resume` stop and continue it."""
    child = subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "watching\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(child.pid, signal.SIGCONT)
        child.communicate("\n", timeout=240)
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_hang_ends_where_its_stacks_cannot_be_written(tmp_path: Path) -> None:
    """The disk may be full or read-only: whoever waits would wait for ever."""
    (tmp_path / "hang_00000.txt").mkdir()
    (tmp_path / "heartbeat_00001.json").write_text("")  # cut off by the same disk
    errors: list[VapoError] = []
    watchdog = Watchdog(HangsConfig(floor_s=6.0), tmp_path, 0, 2, 0.5, errors.append)
    end = time.monotonic() + 20
    while not errors and time.monotonic() < end:
        time.sleep(0.02)
    watchdog.close()
    assert "rank 0 has been in the phase" in str(errors[0])
    assert f"stacks cannot be written to {tmp_path} (Is a directory)" in str(errors[0])


def test_a_rank_that_is_done_is_not_said_to_be_in_a_phase() -> None:
    beats = [
        Heartbeat(0, "export", 4, 1.0, 9.9),
        Heartbeat(1, "over", 9, 1.0, 9.9),
        Heartbeat(2, "export", 4, 1.0, 9.9),
    ]
    assert describe(beats, 3, patience=1.0).startswith(
        "rank 1 (done) did not arrive; ranks 0, 2 wait"
    )
    beats[0] = Heartbeat(0, "over", 9, 1.0, 9.9)
    expected = "rank 0 (done), rank 1 (done) did not arrive; ranks 2 wait in the phase export"
    assert describe(beats, 3, patience=1.0) == expected
