"""A server that sends a byte now and then holds nobody longer than the deadline of the attempt."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.deadlines import ask
from vapo_megatron.engines import external_server
from vapo_megatron.engines.external_server import ask_health, end_server
from vapo_megatron.engines.server import process
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, call_once
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import TryAgain

PAUSE = 0.02  # seconds between two bytes: no read takes long
DEADLINE = 1.0
LATE = 60.0  # a server that held its caller would hold it for ever
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIPS: dict[str, Callable[[], Iterator[bytes]]] = {
    "headers": lambda: itertools.chain([HEAD, b"X: "], itertools.repeat(b"x")),
    "body": lambda: itertools.chain(
        [HEAD, b"Content-Length: 1000000\r\n\r\n"], itertools.repeat(b" ")
    ),
    "body without an end": lambda: itertools.chain([HEAD, b"\r\n{}"], itertools.repeat(b" ")),
}


@pytest.fixture(params=DRIPS)
def dripping(request: pytest.FixtureRequest) -> Iterator[EngineAddress]:
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65536)
            for part in DRIPS[request.param]():
                connection.sendall(part)
                if over.wait(PAUSE):
                    return

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield EngineAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", "none.log")
    over.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LATE


def test_any_request(dripping: EngineAddress) -> None:
    with pytest.raises(TimeoutError, match=f"no answer from {dripping.url}/a within 1 s"):
        ask(f"{dripping.url}/a", DEADLINE)


def test_health_of_an_engine(dripping: EngineAddress) -> None:
    assert ask_health(dripping, DEADLINE) is None


def test_end_of_an_engine(dripping: EngineAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_server, "_END_SECONDS", DEADLINE)
    end_server(dripping, "a test")


def test_start_of_an_engine(
    dripping: EngineAddress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_READY_SECONDS", DEADLINE)
    monkeypatch.setattr(EngineServer, "address", dripping)
    server = EngineServer(tmp_path, RolloutConfig(), "float32", tmp_path / "engine.log")
    assert not server.is_ready()


def test_call_to_an_engine(dripping: EngineAddress) -> None:
    with pytest.raises(TryAgain, match=r"no answer to continue_generation within 1 s|is gone"):
        call_once(dripping, EngineClient.resume, DEADLINE)
