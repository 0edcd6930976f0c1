"""A run stops while there is still time to save, and never because of time that it does not
need."""

import subprocess
import sys
import time

import pytest

from vapo_megatron.checkpoint.checkpointer import TimeLimit, earliest_deadline, margin_before
from vapo_megatron.signals import job_end_time


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def work(limit: TimeLimit, clock: Clock, seconds: float) -> bool:
    """A stretch of work; whether time is short after it."""
    clock.now += seconds
    limit.reached_point()
    return limit.is_short


def test_time_is_short_if_longest_stretch_and_save_would_not_end() -> None:
    clock = Clock()
    limit = TimeLimit(deadline=1000 + 100, margin=5, clock=clock)
    limit.left_point()
    limit.saved(10)
    assert not work(limit, clock, 30)  # 70 left, 30 + 10 + 5 needed
    limit.left_point()
    assert not work(limit, clock, 20)  # 50 left
    limit.left_point()
    assert work(limit, clock, 10)  # 40 left


def test_long_stretch_is_expected_again_however_long_ago() -> None:
    clock = Clock()
    limit = TimeLimit(deadline=1000 + 200, margin=0, clock=clock)
    limit.left_point()
    assert not work(limit, clock, 60)  # with an evaluation, which comes once in many steps
    for _ in range(16):
        limit.left_point()
        assert not work(limit, clock, 5)
    limit.left_point()
    assert work(limit, clock, 1)  # 59 left


@pytest.mark.full
def test_a_limit_counts_from_the_start_of_the_process() -> None:
    code = (
        "import time; time.sleep(4); "
        "from vapo_megatron.checkpoint.checkpointer import process_start as p; print(p())"
    )
    before = time.time()
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    started = float(told.stdout)
    assert before - 2 < started < time.time() - 2, (
        "the kernel's boot time, from which it counts, is in whole seconds"
    )


def test_what_happens_at_a_point_is_no_stretch_of_work() -> None:
    clock = Clock()
    limit = TimeLimit(deadline=1000 + 100, margin=0, clock=clock)
    limit.left_point()
    assert not work(limit, clock, 10)
    clock.now += 60  # a save that is waited for
    limit.left_point()
    assert not work(limit, clock, 10), "20 are left and 10 needed"


def test_without_a_deadline_time_is_never_short() -> None:
    clock = Clock()
    limit = TimeLimit(None, margin=1e9, clock=clock)
    assert not work(limit, clock, 1e9)


def test_the_earlier_of_the_configs_and_slurms_limit_counts() -> None:
    assert earliest_deadline(1000, None, None) is None
    assert earliest_deadline(1000, 120, None) == 1120
    assert earliest_deadline(1000, 120, 1100) == earliest_deadline(1000, None, 1100) == 1100
    assert job_end_time({"SLURM_JOB_END_TIME": "1760000000"}) == 1_760_000_000
    assert (
        job_end_time({})
        is job_end_time({"SLURM_JOB_END_TIME": "0"})
        is job_end_time({"SLURM_JOB_END_TIME": ""})
        is None
    )


def test_margin_is_three_minutes_or_a_twentieth_of_a_short_job() -> None:
    assert margin_before(None, 0.0) == 0
    assert margin_before(4 * 3600.0, 0.0) == 180
    assert margin_before(1000.0 + 600.0, 1000.0) == 30
    assert margin_before(1000.0, 2000.0) == 0, "a deadline that has passed"
