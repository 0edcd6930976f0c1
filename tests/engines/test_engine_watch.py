"""An engine that somebody else started is left out while it is gone, and taken back when it is ours
to take."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stub_engine import StubServer

from vapo_megatron.config.rollout import HealthConfig, RolloutConfig
from vapo_megatron.engines.external_server import ExternalServer, ask_health
from vapo_megatron.engines.keeper import EngineKeeper
from vapo_megatron.engines.remote_engines import take_back

CONFIG = RolloutConfig(health=HealthConfig(answer_s=1.0, max_failures=1))
DEADLINE = 120


LOOK_SECONDS = 0.1


@pytest.fixture(autouse=True)
def often(look_every: Callable[[float], None]) -> None:
    look_every(LOOK_SECONDS)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubServer]:
    server = StubServer(tmp_path)
    server.start()
    server.wait_until_ready()
    yield server
    server.stop()


def stumble(*_: Any) -> None:
    raise KeyError("lost")


class Confusing(ExternalServer):
    """Nobody can say which of its processes are lost."""

    lost = stumble


def watched(
    stub: StubServer,
    fields: dict[str, Any],
    lost: list[str],
    server: type[ExternalServer] = ExternalServer,
) -> EngineKeeper:
    take = partial(take_back, deadline=CONFIG.health.answer_s, fields=fields)
    watch = EngineKeeper(server(stub.address, take), CONFIG, start_timeout_s=math.inf)
    watch.on_lost = lost.append
    watch.wait_until_ready()
    return watch


def wait_until(watch: EngineKeeper, state: str) -> None:
    end = time.monotonic() + DEADLINE
    while watch.status().state != state:
        assert time.monotonic() < end, f"not {state}: {watch.status()}"
        time.sleep(0.02)


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "cause"), [("server", "it has not answered for 1 s"), ("scheduler", "its scheduler")]
)
def test_one_that_stands_still_is_left_out_and_comes_back(
    stub: StubServer, role: str, cause: str
) -> None:
    lost: list[str] = []
    watch = watched(stub, {}, lost)
    try:
        os.kill(stub.processes[role], signal.SIGSTOP)
        wait_until(watch, "starting")
        assert cause in watch.status().cause and lost == [stub.address.url]
        stub.stop()  # as its owner does
        stub.start_again()
        wait_until(watch, "serving")
        assert watch.status().failures == watch.status().in_a_row == 1
        watch.survived()
        assert watch.status().in_a_row == 0
    finally:
        watch.stop()


def test_one_that_lies_is_told_to_end_and_given_up_in_the_end(stub: StubServer) -> None:
    watch = watched(stub, {}, [])
    try:
        watch.fail("a test")
        assert watch.status().state == "starting" and ask_health(stub.address, 1) is None
        stub.stop()
        stub.start_again()
        wait_until(watch, "serving")
        watch.fail("a test")
        assert watch.status().state == "given up"
    finally:
        watch.stop()


def test_one_that_comes_back_as_another_is_not_taken(
    stub: StubServer, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watched(stub, {"rollout.tp": 2}, [])
    try:
        watch.fail("a test")
        stub.stop()
        stub.start_again()
        stub.wait_until_ready()
        time.sleep(5 * LOOK_SECONDS)
        assert (
            watch.status().state == "starting"
            and "was started with rollout.tp=None and this run has 2" in caplog.text
        )
    finally:
        watch.stop()


def test_what_its_watch_stumbles_over_is_told(stub: StubServer) -> None:
    lost: list[str] = []
    watch = watched(stub, {}, lost, Confusing)
    try:
        wait_until(watch, "given up")
        assert "its keeper failed (KeyError: 'lost')" in watch.status().cause and lost == [
            stub.address.url
        ]
    finally:
        watch.stop()


def test_engine_whose_keeper_stumbles_never_claims_to_serve(stub: StubServer) -> None:
    states: list[Any] = []

    class Told(EngineKeeper):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_state":
                states.append(value)
            super().__setattr__(name, value)

    watch = Told(ExternalServer(stub.address, stumble), CONFIG, start_timeout_s=math.inf)
    watch.wait_until_ready()
    try:
        watch.fail("a test")
        stub.stop()
        stub.start_again()
        wait_until(watch, "given up")
        assert (
            states == ["starting", "serving", "waiting", "starting", "given up"]
            and watch.status().failures == 2
        )
    finally:
        watch.stop()
