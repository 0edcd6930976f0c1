"""Phases are summed, nest, survive exceptions and are charged with the memory reached in them."""

import pytest
from stand_ins import Clock

from vapo_megatron.monitoring.timers import GIB, MemoryGauge, PhaseTimer, host_gauge


def test_a_phase_is_summed_until_it_is_taken(clock: Clock) -> None:
    timer = PhaseTimer(gauges={})
    for seconds in (2.0, 3.0):
        with timer("rollout"):
            clock.now += seconds
    with pytest.raises(KeyError), timer("update"):
        clock.now += 1.0
        raise KeyError
    assert timer.seconds("rollout") == 5.0
    assert timer.take() == {"time/rollout": 5.0, "time/update": 1.0}
    assert timer.take() == {}


def test_a_phase_within_a_phase_counts_for_both(clock: Clock) -> None:
    timer = PhaseTimer(gauges={})
    with timer("step"):
        clock.now += 1.0
        with timer("update"):
            clock.now += 4.0
    assert timer.take() == {"time/step": 5.0, "time/update": 4.0}


def test_memory_is_charged_to_phases_open_when_it_was_reached() -> None:
    level = [1 * GIB]
    mark = [0]

    def use(amount: int) -> None:
        level[0] = amount * GIB
        mark[0] = max(mark[0], level[0])

    def reset() -> None:
        mark[0] = level[0]

    timer = PhaseTimer(gauges={"memory/device": MemoryGauge(reset, lambda: mark[0])})
    with timer("step"):
        use(2)
        with timer("update"):
            use(7)
            use(3)
        with timer("sync"):
            use(4)
            use(1)
    with timer("rollout"):
        pass
    peaks = {name: value for name, value in timer.take().items() if name.startswith("memory")}
    assert peaks == {
        "memory/device/update_gib": 7.0,
        "memory/device/sync_gib": 4.0,
        "memory/device/step_gib": 7.0,
        "memory/device/rollout_gib": 1.0,
    }


def test_the_device_is_waited_for_before_the_clock_is_read(clock: Clock) -> None:
    def finish_launched_work() -> None:
        clock.now += 10.0

    timer = PhaseTimer(gauges={}, synchronize=finish_launched_work)
    with timer("update"):
        clock.now += 1.0
    assert timer.take() == {"time/update": 11.0}


def test_the_host_gauge_sees_memory_that_is_given_back() -> None:
    gauge = host_gauge()
    gauge.reset()
    before = gauge.peak()
    block = bytearray(200 * 2**20)
    del block
    if gauge.peak() == before:
        pytest.skip("this machine's /proc does not keep the high-water mark")
    assert gauge.peak() - before > 150 * 2**20
    gauge.reset()
    assert gauge.peak() - before < 100 * 2**20
