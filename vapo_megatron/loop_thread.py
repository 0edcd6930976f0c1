"""An event loop in a separate thread: requests to engines continue while the main thread trains."""

import asyncio
import logging
import resource
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# More than any rollout needs, few enough for a process that closes all of them one by one
_MOST_FILES = 1 << 20


def allow_connections() -> None:
    """Raise this process's soft limit of open files: each group in flight takes one, and many
    shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        # The system allows fewer; the client reports it if they run out
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class DaemonExecutor(ThreadPoolExecutor):
    """Runs functions in threads that the interpreter does not wait for when it ends.

    asyncio takes nothing but a ThreadPoolExecutor as a loop's default, and that class joins its
    threads at exit: one function that never returns would keep the process for ever.
    """

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self._room = threading.BoundedSemaphore(max_workers)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Start a thread for one call; it waits where max_workers calls are running."""
        future: Future[T] = Future()

        def run() -> None:
            with self._room:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="agent", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: its threads end with their calls, or with the process."""


class LoopThread:
    """Runs coroutines in one thread until it is closed. Its methods are for other threads."""

    def __init__(self, name: str = "rollout", threads: int | None = None) -> None:
        """threads: how many functions of asyncio.to_thread() run at once, in threads that are left
        behind where they do not end; None: asyncio's own executor, whose threads are waited for."""
        self._loop = asyncio.new_event_loop()
        if threads is not None:
            self._loop.set_default_executor(DaemonExecutor(threads))
        self._is_closing = False
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return self._loop.time()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; cancelling the future cancels it. Raises RuntimeError once it is
        closed, as callers that were left behind find."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()  # else Python warns that nobody awaited it
            raise

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine to its end; it is cancelled if this thread is interrupted.

        Raises:
            TimeoutError: it did not end within `seconds`.
        """
        future = self.start(work)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    async def answers(self, seconds: float) -> bool:
        """Whether the loop runs anything within `seconds`; for coroutines of another loop."""
        probe = self.start(asyncio.sleep(0))
        try:
            await asyncio.wait_for(asyncio.wrap_future(probe), seconds)
        except TimeoutError:
            return False
        return True

    def cancel_all(self, seconds: float | None = None) -> None:
        """Cancel all tasks and wait for their end. Raises TimeoutError after `seconds`."""
        self.run(self._cancel_all(), seconds)

    def close(self, seconds: float | None = None) -> bool:
        """Cancel all tasks and end the thread. Returns whether it ended within `seconds`; if not,
        it is left behind and ends with the process."""
        if self._loop.is_closed():
            return True
        with suppress(TimeoutError):
            self.cancel_all(seconds)
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        return True

    def _run_loop(self) -> None:
        """Run until close(), although a task stops the loop or raises SystemExit through it."""
        while not self._is_closing:
            try:
                self._loop.run_forever()
            except BaseException as error:
                _logger.warning("a task in the thread %s raised %r", self._thread.name, error)

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
