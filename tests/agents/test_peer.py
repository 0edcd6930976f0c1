"""Every call between two processes ends: with a result, an error, or the end of the other one."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vapo_megatron.agents.peer import Peer
from vapo_megatron.errors import BadInput, RunFailed

SECONDS = 20.0


class Other:
    """What the other process can be asked."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def doubled(self, content: bytes) -> bytes:
        return 2 * content

    async def late(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def never(self) -> None:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def refuses(self) -> None:
        raise BadInput("rollout.agent=x: no")

    async def raises(self) -> None:
        raise KeyError("of mine")

    async def loses_a_server(self) -> None:
        raise ConnectionResetError("of the server")

    async def cancels_itself(self) -> None:
        raise asyncio.CancelledError

    async def returns_a_lock(self) -> Any:
        return threading.Lock()

    def methods(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {name: getattr(self, name) for name in dir(self) if inspectable(self, name)}


def inspectable(other: Other, name: str) -> bool:
    return asyncio.iscoroutinefunction(getattr(other, name))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Peer, Peer, Other, list["asyncio.Task[None]"]]]:
    """One end, the other end, what this one serves, and the tasks of both."""
    ends = socket.socketpair()
    other = Other()
    here, there = Peer({}), Peer(other.methods())
    tasks = [
        asyncio.create_task(peer.serve(end)) for peer, end in zip((here, there), ends, strict=True)
    ]
    async with asyncio.timeout(SECONDS):
        yield here, there, other, tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "method,kind,message",
    [
        ("refuses", BadInput, "rollout.agent=x: no"),
        ("raises", RunFailed, "KeyError: 'of mine'"),
        ("loses_a_server", RunFailed, "ConnectionResetError: of the server"),
        ("cancels_itself", RunFailed, "cancels_itself: CancelledError"),
        ("returns_a_lock", RunFailed, "returns_a_lock: TypeError: cannot pickle"),
        ("unknown", RunFailed, "KeyError: 'unknown'"),
    ],
)
def test_whatever_a_method_does_its_caller_hears(
    method: str, kind: type[Exception], message: str
) -> None:
    async def run() -> bytes:
        async with connected() as (here, *_):
            with pytest.raises(kind, match=message) as raised:
                await here.call(method)
            assert type(raised.value) is kind
            doubled: bytes = await here.call("doubled", b"more")
            return doubled

    assert asyncio.run(run()) == b"moremore"


def test_large_and_many_calls_do_not_wait_for_each_other() -> None:
    async def run() -> list[Any]:
        async with connected() as (here, *_):
            late = asyncio.create_task(here.call("late", 0.2))
            large = [here.call("doubled", bytes([n]) * (4 << 20)) for n in range(8)]
            answers = await asyncio.gather(*large)
            assert not late.done() or all(answers)
            return [await late, *((answer[0], len(answer)) for answer in answers)]

    assert asyncio.run(run()) == [0.2, *((n, 8 << 20) for n in range(8))]


def test_a_call_that_is_given_up_ends_there_and_leaves_nothing() -> None:
    async def run() -> None:
        async with connected() as (here, there, other, _):
            given_up = asyncio.create_task(here.call("never"))
            await other.waits.wait()
            given_up.cancel()
            await other.cancelled.wait()
            # The call and its end arrive together: it does not even begin
            at_once = asyncio.create_task(here.call("never"))
            await asyncio.sleep(0)
            at_once.cancel()
            # An answer that nobody waits for any more
            answered = asyncio.create_task(here.call("late", 0.0))
            await asyncio.sleep(0)
            answered.cancel()
            assert await here.call("doubled", b"-") == b"--"
            assert not here._asked and not there._served

    asyncio.run(run())


@pytest.mark.parametrize("ends", [0, 1])
def test_calls_end_with_the_other_process(ends: int) -> None:
    """Even where a fork of it holds its end of the connection: a copy stands in for that."""

    async def run() -> None:
        async with connected() as (here, there, other, tasks):
            waiting = asyncio.create_task(here.call("never"))
            await other.waits.wait()
            peer = (here, there)[ends]
            assert peer._writer is not None
            copy = os.dup(peer._writer.get_extra_info("socket").fileno())
            try:
                tasks[ends].cancel()
                with pytest.raises(ConnectionError):
                    await waiting
                await asyncio.wait(tasks)
            finally:
                os.close(copy)
            await other.cancelled.wait()
            with pytest.raises(ConnectionError):
                await here.call("doubled", b"later")
            here.tell("doubled", b"nobody needs it")

    asyncio.run(run())


def test_a_call_before_the_connection_ends_with_it() -> None:
    async def run() -> None:
        async with asyncio.timeout(SECONDS):
            peer = Peer({})
            early = asyncio.create_task(peer.call("anything"))
            ours, theirs = socket.socketpair()
            with ours, theirs:
                served = asyncio.create_task(peer.serve(ours))
                await asyncio.sleep(0)
                served.cancel()
                with pytest.raises(ConnectionError):
                    await early

    asyncio.run(run())
