"""An engine whose process is killed, stopped or called wrong is ended whole, and serves again at
the same address."""

import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stand_ins import Clock
from stub_engine import StubServer

from vapo_megatron.config.rollout import HealthConfig, RolloutConfig
from vapo_megatron.engines.external_server import ask_health, end_server
from vapo_megatron.engines.inside.heartbeat import Heartbeat, beats_with, register
from vapo_megatron.engines.keeper import EngineKeeper, fault_of, is_named
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.process import EngineServer

HEALTH = HealthConfig(answer_s=2, max_failures=2)
DEADLINE = 120


LOOK_SECONDS = 0.1


@pytest.fixture(autouse=True)
def often(look_every: Callable[[float], None]) -> None:
    look_every(LOOK_SECONDS)


class Server(StubServer):
    """A server of two processes, whose keeper may stumble over it.

    Attributes:
        refusals: raised by its next starts, one each.
        confusion: raised when it is asked for its lost processes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refusals: list[Exception] = []
        self.confusion: Exception | None = None

    def start_again(self) -> None:
        if self.refusals:
            self.starts += 1
            raise self.refusals.pop(0)
        self.start()

    def lost(self) -> str | None:
        if self.confusion is not None:
            raise self.confusion
        return super().lost()


@pytest.fixture
def stub(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def keeper(stub: Server) -> Iterator[EngineKeeper]:
    keeper = EngineKeeper(stub, RolloutConfig(start_timeout_s=20, health=HEALTH))  # type: ignore[arg-type]
    keeper.start()
    keeper.wait_until_ready()
    yield keeper
    keeper.stop()


def wait_until(keeper: EngineKeeper, state: str) -> None:
    end = time.monotonic() + DEADLINE
    while keeper.status().state != state:
        assert time.monotonic() < end, f"not {state}: {keeper.status()}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "number", "cause"),
    [
        ("scheduler", signal.SIGKILL, r"its scheduler \(process \d+\) is dead"),
        ("scheduler", signal.SIGSTOP, r"its scheduler \(process \d+\) is stopped"),
        ("server", signal.SIGKILL, r"its HTTP server exited \(exit code -9\)"),
        ("server", signal.SIGSTOP, r"it has not answered for [23] s"),
    ],
)
def test_a_server_with_a_dead_or_stopped_process_is_replaced(
    keeper: EngineKeeper, stub: Server, role: str, number: int, cause: str
) -> None:
    before = stub.processes
    address = keeper.address
    assert before.keys() == {"scheduler", "server"}
    os.kill(before[role], number)
    wait_until(keeper, "starting")
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in before.values()):
        assert time.monotonic() < end, "processes of the old one live on"
    wait_until(keeper, "serving")
    assert keeper.address == address and stub.processes.keys() == before.keys()
    assert re.search(cause, keeper.status().cause), keeper.status().cause
    time.sleep(5 * LOOK_SECONDS)
    assert keeper.status().state == "serving" and keeper.status().failures == 1


def test_a_server_that_is_told_to_end_starts_again_when_it_may(
    keeper: EngineKeeper, stub: Server
) -> None:
    keeper.let_start(False)
    end_server(keeper.address, "a test")
    wait_until(keeper, "waiting")
    time.sleep(3 * LOOK_SECONDS)
    assert (
        keeper.status().state == "waiting"
        and ask_health(keeper.address, 1) is None
        and stub.starts == 1
    )
    keeper.let_start(True)
    wait_until(keeper, "starting")
    keeper.let_start(False)  # in the middle of its start
    assert keeper.status().state == "waiting" and ask_health(keeper.address, 1) is None
    assert keeper.status().interrupted == 1
    keeper.let_start(True)
    wait_until(keeper, "serving")
    assert keeper.status().interrupted == 0


def test_failures_in_a_row_end_it(keeper: EngineKeeper, stub: Server) -> None:
    keeper.fail("log-probs differ")
    wait_until(keeper, "serving")
    keeper.survived()
    for number in (1, 2):
        keeper.fail("log-probs differ")
        wait_until(keeper, "serving")
        assert keeper.status().in_a_row == number
    keeper.fail("log-probs differ again")
    told = keeper.status()
    assert (told.state, told.failures) == ("given up", 4)
    assert told.cause == f"{keeper.address.url}: log-probs differ again"
    time.sleep(5 * LOOK_SECONDS)
    assert keeper.status().state == "given up" and stub.starts == 4


@pytest.mark.usefixtures("temporary")
def test_open_requests_without_a_batch_are_a_hang(clock: Clock) -> None:
    """The clock stops for a scheduler that has requests and begins no batch; idle time does not
    count."""

    class Scheduler:
        def run_batch(self, batch: str) -> str:
            return batch

    beats_with(Scheduler, register("scheduler"))
    requests: list[Any] = []
    told = Heartbeat(lambda: requests)

    def wrong() -> str | None:
        return fault_of(health(told), RolloutConfig(start_timeout_s=1))

    for clock.now, open_requests, works, is_wrong in [
        (500.0, 0, False, False),  # idle
        (610.0, 2, False, False),  # since 110 s
        (615.0, 2, True, False),
        (730.0, 2, False, False),
        (740.0, 2, False, True),  # 125 s after the last batch
        (741.0, 2, True, False),
    ]:
        requests[:] = range(open_requests)
        if works:
            assert Scheduler().run_batch("batch") == "batch"
        assert (wrong() is not None) == is_wrong, clock.now
    clock.now = 900.0
    assert "2 requests are waiting and no batch has finished for 159 s" in str(wrong())


@pytest.mark.usefixtures("temporary")
def test_first_batches_may_compile_and_a_pause_is_no_hang(clock: Clock) -> None:
    paused = False
    told = Heartbeat(lambda: ["a request"], lambda: paused)

    def after(seconds: float) -> str | None:
        clock.now += seconds
        return fault_of(health(told), RolloutConfig())

    class Scheduler:
        def run_batch(self, seconds: float) -> str | None:
            return after(seconds)

    beats_with(Scheduler, register("scheduler"))
    batch = Scheduler().run_batch
    assert batch(890) is None and "(limit 900 s, in its first 100 batches)" in str(batch(910))
    assert all(batch(1) is None for _ in range(98))
    assert batch(110) is None and "(limit 120 s)" in str(batch(130))
    paused = True
    hasty = RolloutConfig(start_timeout_s=1)
    assert after(590) is None and fault_of(health(told), hasty) is None, (
        "as long as a bucket may take"
    )
    assert "(limit 600 s, paused for a weight sync)" in str(
        (after(20), fault_of(health(told), hasty))
    )
    assert "(limit 900 s, paused" in str(after(300))
    paused = False
    assert after(2) is None and after(110) is None and after(20) is not None


def test_what_its_keeper_stumbles_over_is_told(keeper: EngineKeeper, stub: Server) -> None:
    """The thread must not end without a word: who waits for the server would wait for ever."""
    stub.refusals = [OSError(28, "No space left on device"), RuntimeError("a surprise")]
    keeper.fail("a test")  # the disk is full for a moment
    wait_until(keeper, "given up")
    assert "its keeper failed (RuntimeError: a surprise)" in keeper.status().cause


def test_full_disk_does_not_keep_an_engine_from_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error would go through whoever found the engine wrong, a weight sync for example."""
    server = EngineServer(tmp_path, RolloutConfig(), "float32", tmp_path / "engine_0.log")
    (tmp_path / "engine_0.log").touch()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    assert server.end("a test") == tmp_path / "engine_0.log"
    monkeypatch.undo()
    assert server.end("a test") == tmp_path / "engine_0.ended1.log"


def test_a_server_whose_keeper_failed_is_ended(keeper: EngineKeeper, stub: Server) -> None:
    before = stub.processes
    stub.confusion = RuntimeError("a surprise")
    wait_until(keeper, "given up")
    deadline = time.monotonic() + 120  # killed processes end a moment after the signal
    while any(is_alive(pid) for pid in before.values()):
        assert time.monotonic() < deadline, "its processes outlive it"
        time.sleep(0.05)


def test_a_long_service_does_not_excuse_a_lie(stub: Server) -> None:
    long = 0.3
    keeper = EngineKeeper(
        stub, RolloutConfig(start_timeout_s=long, health=HEALTH), start_timeout_s=20
    )  # type: ignore[arg-type]
    keeper.start()
    keeper.wait_until_ready()
    try:
        for served, in_a_row in ((False, 1), (False, 2), (True, 1)):
            time.sleep(long)
            keeper.fail("a lie", served)
            assert keeper.status().in_a_row == in_a_row
            wait_until(keeper, "serving")
    finally:
        keeper.stop()


def test_a_cause_names_the_server_of_its_whole_url() -> None:
    url = "http://h:3000"
    assert all(
        is_named(url, cause)
        for cause in (f"{url}: gone", f"{url} (log a.log): gone", f"the one at {url}")
    )
    assert not any(is_named(url, cause) for cause in (f"{url}1: gone", "http://i:3000: gone"))


def test_an_answer_that_breaks_off_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = EngineAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "no log")

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{")

        threading.Thread(target=answer).start()
        assert ask_health(asked, 5) is None


def health(told: Heartbeat) -> dict[str, Any]:
    """What a coroutine that waits for nothing returns."""
    try:
        told.health().send(None)
    except StopIteration as end:
        return dict(end.value)
    raise AssertionError("it waits")


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_real_server_tells_of_its_processes(server: EngineServer, role: str) -> None:
    found = ask_health(server.address, 5)
    assert found is not None and fault_of(found, RolloutConfig()) is None and found["requests"] == 0
    scratch = Path(psutil.Process(server.pid).environ()["TMPDIR"])
    pid = next(int(path.name.split("-")[2]) for path in scratch.glob(f"process-{role}-*"))
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 120
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < end:
        time.sleep(0.01)  # it stops when it is next on a core
    found = ask_health(server.address, 5)
    os.kill(pid, signal.SIGCONT)
    assert found is not None and found["lost"] == [f"its {role} (process {pid}) is stopped"]


def test_server_is_watched_by_process_ids_without_requests(server: EngineServer) -> None:
    """SGLang's handler of a dead child keeps HTTP from answering for a minute."""
    scratch = Path(psutil.Process(server.pid).environ()["TMPDIR"])
    pids = {
        path.name.split("-")[1]: int(path.name.split("-")[2]) for path in scratch.glob("process-*")
    }
    assert server.lost() is None and {"scheduler", "detokenizer", "guard"} <= pids.keys()
    for role in ("scheduler", "detokenizer"):
        assert f"sglang::{role}" in " ".join(psutil.Process(pids[role]).cmdline()), "ps names it"
    for role, pid in {**pids, "HTTP server": server.pid}.items():
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 120
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < end:
            time.sleep(0.01)
        lost = server.lost()
        os.kill(pid, signal.SIGCONT)
        assert lost == f"its {role} (process {pid}) is stopped"
