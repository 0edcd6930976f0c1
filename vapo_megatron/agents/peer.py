"""Calls between two processes of a run, both ways and many at a time."""

import asyncio
import itertools
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from vapo_megatron.errors import RunFailed, VapoError, reason_of

_LENGTH = struct.Struct("<Q")
_GONE = "the other process is gone"

Kind = Literal["call", "cancel", "tell", "result", "error"]


class Peer:
    """The other end of a socket.

    The two processes trust each other: a message is a pickle of its kind, the number of its call
    and what belongs to it. The coroutines belong to one event loop, that of serve().
    """

    def __init__(self, methods: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        """methods: what the other process may call, by name."""
        self._methods = methods
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._served: dict[int, asyncio.Task[None]] = {}
        self._told: set[asyncio.Task[Any]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._is_open = asyncio.Event()

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls, and take the answers to ours, until the other process closes its end or
        this task is cancelled. Calls that wait then raise ConnectionError."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._is_open.set()
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    self._receive(*pickle.loads(await reader.readexactly(length)))
        finally:
            self._writer.close()
            self._writer = None
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(_GONE))
            for task in (*self._served.values(), *self._told):
                task.cancel()

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the other process's method returns. Cancelling this cancels it there.

        Raises:
            ConnectionError: the other process is gone.
            VapoError: as the method raised it; RunFailed for any other exception.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self._is_open.wait()
            self._send("call", number, method, arguments)
            return await answer
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                self._send("cancel", number)
            raise
        finally:
            del self._asked[number]

    def tell(self, method: str, *arguments: Any) -> None:
        """Have the other process call its method, whose result nobody needs. Nothing happens if it
        is gone."""
        with suppress(ConnectionError):
            self._send("tell", 0, method, arguments)

    def _send(self, kind: Kind, number: int, *content: Any) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError(_GONE)
        message = pickle.dumps((kind, number, *content), protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(message)))
        self._writer.write(message)

    def _receive(self, kind: Kind, number: int, *content: Any) -> None:
        if kind == "call":
            self._served[number] = asyncio.create_task(self._answer(number, *content))
        elif kind == "tell":
            method, arguments = content
            task = asyncio.ensure_future(self._methods[method](*arguments))
            self._told.add(task)  # asyncio itself keeps no reference to tasks
            task.add_done_callback(self._told.discard)
        elif kind == "cancel":
            if number in self._served:
                self._served[number].cancel()
        else:
            answer = self._asked.get(number)
            if answer is None or answer.done():  # the caller has given it up
                return
            if kind == "result":
                answer.set_result(*content)
            else:
                answer.set_exception(*content)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = await self._methods[method](*arguments)
            self._send("result", number, result)
        except ConnectionError:
            pass  # nobody is left to be answered
        except VapoError as error:
            self._send("error", number, error)
        except Exception as error:
            self._send("error", number, RunFailed(reason_of(error)))
        finally:
            del self._served[number]
