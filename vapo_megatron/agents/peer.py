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
    and what belongs to it. The coroutines run in the event loop of serve().
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
        try:
            reader, self._writer = await asyncio.open_connection(sock=connection)
            self._is_open.set()
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    self._receive(*pickle.loads(await reader.readexactly(length)))
        finally:
            self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        # Closing alone does not tell the other process where a fork of this one has the socket, too
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self._is_open.set()  # calls that wait for it fail
        for task in (*self._served.values(), *self._told):
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError(_GONE))

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the other process's method returns. Cancelling this cancels it there.

        Raises:
            ConnectionError: the other process is gone.
            VapoError: as the method raised it; RunFailed for any other exception.
        """
        await self._is_open.wait()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
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
            served = asyncio.create_task(self._answer(number, *content))
            self._served[number] = served
            served.add_done_callback(lambda _: self._served.pop(number))
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
        kind: Kind = "error"
        answer: Any
        try:
            answer = await self._methods[method](*arguments)
            kind = "result"
        except VapoError as error:
            answer = error
        except asyncio.CancelledError as error:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise  # nobody waits for it
            answer = RunFailed(f"{method}: {reason_of(error)}")
        except Exception as error:
            answer = RunFailed(reason_of(error))
        try:
            self._send(kind, number, answer)
        except ConnectionError:
            pass  # nobody is left to be answered
        except Exception as error:  # what cannot be pickled raises anything
            self._send("error", number, RunFailed(f"{method}: {reason_of(error)}"))
