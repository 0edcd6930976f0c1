"""An engine must release its memory only when idle: a busy one would end
itself."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.errors import RunFailed, TryAgain


class BusyServer(HTTPServer):
    """Answers as SGLang does: 400 to flush_cache while it is at work, which it is for some
    requests."""

    busy = 0
    refusal = 400

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(f"http://127.0.0.1:{self.server_port}", "/nowhere/engine.log")


class Handler(BaseHTTPRequestHandler):
    server: BusyServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        idle = self.path != "/flush_cache" or self.server.busy <= 0
        self.server.busy -= self.path == "/flush_cache"
        self.send_response(200 if idle else self.server.refusal)
        self.end_headers()
        self.wfile.write(b"Cache flushed.\n" if idle else b"Flush cache failed.\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[BusyServer]:
    running = BusyServer()
    yield running
    running.shutdown()
    running.server_close()


def release(server: BusyServer, deadline: float) -> None:
    async def call() -> None:
        client = EngineClient(server.address, deadline)
        try:
            await client.release_memory(["kv_cache", "weights"])
        finally:
            await client.close()

    asyncio.run(call())


def test_memory_is_asked_for_once_the_server_is_idle(server: BusyServer) -> None:
    server.busy = 3
    release(server, deadline=20.0)
    assert server.asked == ["/flush_cache"] * 4 + ["/release_memory_occupation"]


def test_busy_server_is_named_in_one_line_and_keeps_its_memory(
    server: BusyServer,
) -> None:
    server.busy = 10_000
    with pytest.raises(TryAgain, match=r"was not idle within 0\.4 s") as told:
        release(server, deadline=0.4)
    assert "\n" not in str(told.value) and "/release_memory_occupation" not in server.asked


def test_another_refusal_is_not_waited_out(server: BusyServer) -> None:
    server.busy = 10_000
    server.refusal = 403
    with pytest.raises(RunFailed, match=r"flush_cache was refused \(HTTP 403\)"):
        release(server, deadline=20.0)
    assert server.asked == ["/flush_cache"]
