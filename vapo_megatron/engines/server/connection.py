"""A connection to one SGLang server: requests, their deadline, and errors that say whose fault it
is."""

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import RunFailed, TryAgain, VapoError, reason_of

REQUEST_SECONDS = 600.0
"""Deadline of an answer other than responses, such as that to a bucket of weights."""


class EngineWrong(RunFailed):
    """The server's answer is invalid: another server, or this one after a restart, may answer
    correctly."""


class Connection:
    """Sends requests to one server from one event loop.

    Every request raises TryAgain if the server is gone or silent for longer than the deadline, and
    RunFailed if it refuses (EngineWrong if it is at fault). The message names its address and its
    log.
    """

    def __init__(self, address: EngineAddress, deadline: float) -> None:
        """deadline: seconds until each request must be answered."""
        self.address = address
        self._deadline = deadline
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close its connections; the next call opens new ones."""
        session = self._session
        self._session = None  # before the await, so that no later call uses it
        if session is not None:
            await session.close()

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Raises EngineWrong if an answer cannot be read inside this context: the server is broken,
        not the run."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EngineWrong(
                f"{self.address}: its answer to {path} cannot be read ({reason_of(error)})"
            ) from None

    async def _call(self, path: str, body: dict[str, Any] | list[str], limited: bool = True) -> Any:
        status, answer = await self._request(path, body, limited)
        if status != 200:
            raise self._refused(path, status, answer)
        return answer

    def _open_session(self) -> aiohttp.ClientSession:
        # A new connection for each request: the server may close a kept one while a request is on
        # its way.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Content-Type": "application/json"}
        if self.address.key:
            headers["Authorization"] = f"Bearer {self.address.key}"
        return aiohttp.ClientSession(connector=connector, headers=headers)

    async def _request(
        self, path: str, body: dict[str, Any] | list[str] | None, limited: bool = True
    ) -> tuple[int, Any]:
        """Status and answer of a POST, or of a GET if body is None.

        The answer is the bytes of a message of columns, otherwise JSON.
        """
        if self._session is None:
            self._session = self._open_session()
        url = f"{self.address.url}/{path}"
        method = "GET" if body is None else "POST"
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=self._deadline if limited else None)
        try:
            async with self._session.request(method, url, data=data, timeout=timeout) as answer:
                content = await answer.read()
                if answer.content_type == columns.MEDIA_TYPE:
                    return answer.status, content
                return answer.status, _decoded(content)
        except TimeoutError:
            raise TryAgain(
                f"{self.address}: no answer to {path} within {self._deadline:g} s: "
                f"{self.address.cause()}"
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TryAgain(
                f"{self.address}: its connections were closed before {path} was requested"
            ) from None
        except aiohttp.ClientError as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise RunFailed(
                    f"{self.address}: no connection for {path}: {error.strerror}; each group in "
                    "flight takes one, raise the limit (ulimit -Hn; LimitNOFILE of slurmd)"
                ) from None
            raise TryAgain(
                f"{self.address}: the server is gone ({type(error).__name__} on {path}): "
                f"{self.address.cause()}"
            ) from None

    def _refused(self, path: str, status: int, answer: Any) -> VapoError:
        if isinstance(answer, dict):
            error = answer.get("error", answer)
        else:
            error = answer
        if isinstance(error, dict):
            message = error.get("message", error)
        else:
            message = error
        first_line = (str(message).splitlines() or ["no reason given"])[0]
        kind: type[VapoError] = RunFailed
        if first_line.startswith("Failed to receive weights"):
            # The broadcast was interrupted: its sender or another receiver is gone.
            kind = TryAgain
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = EngineWrong
        return kind(f"{self.address}: {path} was refused (HTTP {status}): {first_line[:400]}")


def _decoded(content: bytes) -> Any:
    """Parsed JSON, or the text if it is not JSON: some answers are empty, errors may be plain
    text."""
    try:
        return orjson.loads(content)
    except ValueError:
        return content.decode(errors="replace")
