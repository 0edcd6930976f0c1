"""An event loop whose clock jumps to the next thing that is to happen."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from vapo_megatron.engines.loop_thread import LoopThread

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """What an event loop waits with: time passes at once instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout != 0:
            if timeout is None:
                raise RuntimeError("the simulation waits for what will never happen")
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    """Work in threads is done at once, and its result is there when the seconds that it has said it takes are over."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self._clock = clock
        self.ends_at = 0.0

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, work: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        self.ends_at = self.time()
        result = work(*args)
        done: asyncio.Future[T] = self.create_future()

        def end() -> None:
            if not done.cancelled():
                done.set_result(result)

        self.call_at(self.ends_at, end)
        return done


class VirtualLoop(LoopThread):
    """Stands in for the thread that talks to engines. Nothing happens but while its caller waits for something."""

    def __init__(self) -> None:
        self._virtual = self._loop = _Loop(_Clock())

    def sleep(self, seconds: float) -> None:
        """Let time pass, and what falls into it happen."""
        self.run(asyncio.sleep(seconds))

    def call_at(self, time: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Call something at a time."""
        return self._loop.call_at(time, work)

    def ends_at(self, time: float) -> None:
        """For work in a thread: say when it is done."""
        self._virtual.ends_at = time

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """As LoopThread's; it goes on while somebody waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, future: "Future[T]", seconds: float) -> bool:
        """As LoopThread's."""
        timer = self._loop.call_later(seconds, self._loop.stop)
        future.add_done_callback(lambda _: self._loop.stop())
        self._loop.run_forever()
        timer.cancel()
        return future.done()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """As LoopThread's."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Cancel what still runs."""
        if not self._loop.is_closed():
            self.cancel_all()
            self._loop.close()
