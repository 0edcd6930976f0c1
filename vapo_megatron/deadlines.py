"""HTTP requests that end: the deadline is for the whole attempt, so a server that sends a byte now
and then holds nobody."""

import asyncio
import http.client
import socket
import threading
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

# What ask() raises for a server that is gone, silent, or answers something else than HTTP.
NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Answer:
    """Status and body of an answer."""

    status: int
    content: bytes


async def within(seconds: float, request: Awaitable[T]) -> T:
    """The result of a request. The limits of HTTP clients are often for each read.

    Raises:
        TimeoutError: it was not there within `seconds`.
    """
    async with asyncio.timeout(seconds):
        return await request


def ask(
    url: str, seconds: float, *, method: str = "GET", headers: Mapping[str, str] | None = None
) -> Answer:
    """A request without a body, for callers without an event loop; proxies are not used.

    Raises:
        TimeoutError: the whole answer was not there within `seconds`.
        OSError, ValueError, HTTPException: no connection, or an answer that is not HTTP or above
            16 MiB.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    expired = threading.Event()
    sockets: list[socket.socket] = []

    def end() -> None:
        expired.set()
        for connected in sockets:  # none yet: its own limit ends the attempt to connect
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        connection.connect()
        # The connection forgets it at an answer without a length.
        sockets.append(connection.sock)
        if not expired.is_set():
            connection.request(method, target, headers=dict(headers or {}))
            response = connection.getresponse()
            content = response.read(_MOST_BYTES + 1)
        if expired.is_set():
            raise TimeoutError
        if len(content) > _MOST_BYTES:
            raise ValueError(f"an answer of more than {_MOST_BYTES >> 20} MiB")
        return Answer(response.status, content)
    except NO_ANSWER as error:
        if expired.is_set():
            raise TimeoutError(f"no answer from {url} within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
        connection.close()
