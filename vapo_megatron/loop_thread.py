"""An event loop in a thread of its own: what talks to engines there goes on while the main thread trains."""

import asyncio
import resource
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_FILES = 1 << 20  # above what any rollout takes, below what a process that closes each of them would stall at


def allow_connections() -> None:
    """Raise this process's soft limit of open files: each group on its way takes one, many shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # the system allows fewer: the client names them where they run out
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class LoopThread:
    """Runs coroutines in one thread until it is closed. Its methods are for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def time(self) -> float:
        """Seconds, of a clock of its own."""
        return self._loop.time()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin to run something. The future may be cancelled, and the coroutine is then."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns or raises; it is cancelled where this thread is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel_all(self) -> None:
        """Cancel what runs, and wait for its end."""
        self.run(self._cancel_all())

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._loop.is_closed():
            return
        self.cancel_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
