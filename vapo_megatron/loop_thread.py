"""An event loop in a separate thread: requests to engines continue while the main thread trains."""

import asyncio
import resource
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_FILES = 1 << 20  # more than any rollout needs, few enough for a process that closes all of them one by one


def allow_connections() -> None:
    """Raise this process's soft limit of open files: each group in flight takes one, and many shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # the system allows fewer; the client reports it if they run out
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class LoopThread:
    """Runs coroutines in one thread until it is closed. Its methods are for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return self._loop.time()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; it is cancelled if this thread is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel_all(self) -> None:
        """Cancel all tasks and wait for their end."""
        self.run(self._cancel_all())

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
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
