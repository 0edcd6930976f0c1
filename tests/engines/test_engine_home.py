"""The process that keeps engines is replaced where it is stopped or hangs, and named; it must not be waited for."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stub_engine import StubServer

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines import engine_home
from vapo_megatron.engines.engine_home import HomedKeeper, HomeLost, keep_engines
from vapo_megatron.engines.inside.heartbeat import stands_still
from vapo_megatron.engines.keeper import ask_health
from vapo_megatron.run.children import Companion

CONFIG = RolloutConfig(start_timeout_s=20)


class HangingServer(StubServer):
    """One whose start never ends."""

    def start(self) -> None:
        threading.Event().wait()


def make_stub(folder: Path) -> StubServer:
    return StubServer(folder)


def make_hanging(folder: Path) -> StubServer:
    return HangingServer(folder)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Companion]:
    with Companion(partial(keep_engines, tmp_path / "engines"), "engine-home") as home:
        home.ensure()
        yield home


def keeper_in(folder: Path, make: Any = make_stub) -> HomedKeeper:
    keeper = HomedKeeper(folder / "engines", 0, CONFIG, make, (folder,), may_take_over=True)
    keeper.start()
    keeper.wait_until_ready()
    return keeper


def test_a_home_that_is_stopped_is_named_and_another_one_takes_its_place(
    home: Companion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_home, "_STOPPED_SECONDS", 3.0)
    keeper = keeper_in(tmp_path)
    pid, address = home._process.pid, keeper.address
    os.kill(pid, signal.SIGSTOP)
    while stands_still(pid) is None:  # the system takes a moment
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(HomeLost, match="engine-home in `ps`\\) is stopped: it has done nothing for 3 s"):
        keeper.look()
    with pytest.raises(HomeLost, match="is stopped"):
        keeper_in(tmp_path)
    assert time.monotonic() - started < 20
    home.ensure()
    assert home._process.pid != pid and f"engine-home (process {pid}) is ended, as it is stopped" in caplog.text
    again = keeper_in(tmp_path)
    assert again.look().state == "serving" and again.address.url != address.url and not again.taken_over
    assert ask_health(again.address, 5) is not None


def test_a_home_that_hangs_is_ended_once_somebody_has_found_out(
    home: Companion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_home, "_ANSWER_SECONDS", 3.0 - CONFIG.start_timeout_s)
    pid = home._process.pid
    with pytest.raises(HomeLost, match="hangs: it has been at start for 3 s"):
        keeper_in(tmp_path, make_hanging)
    home.ensure()
    assert home._process.pid == pid, "it looks as if it were well"
    home.ensure(hangs=True)
    assert home._process.pid != pid and keeper_in(tmp_path).look().state == "serving"
