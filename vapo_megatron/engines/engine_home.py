"""Engines that outlive the ranks that use them: a process beside the ranks keeps them, and is asked through a socket.

Ranks that are started again find their engines running; what earlier ranks have begun on them ends (take_over).
"""

import asyncio
import logging
import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.keeper import EngineKeeper, Kept
from vapo_megatron.engines.remote_engines import take_over
from vapo_megatron.engines.server import EngineAddress, EngineServer
from vapo_megatron.errors import RunFailed, TryAgain, VapoError

_logger = logging.getLogger(__name__)

# Until the home listens: where processes are spawned it imports first.
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1
# While the home works on an answer it says so; what says nothing for longer is stopped.
_STILL_SECONDS = 1.0
_SILENT_SECONDS = 15.0
# A call that takes longer, beside what a server may take to start, hangs in the home.
_ANSWER_SECONDS = 120.0
_STILL_AT_WORK = "still at work"


class HomeLost(TryAgain):
    """The process that keeps the engines is gone or does not answer: another one has to take its place."""


@dataclass(frozen=True)
class HomedEngine:
    """What an engine is made of. make: called in the home with the arguments; a function of a module."""

    make: Callable[..., EngineServer]
    arguments: tuple[Any, ...]
    config: RolloutConfig


@dataclass
class _Home:
    """kept: the engines so far, by their number."""

    kept: dict[int, tuple[HomedEngine, EngineKeeper]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, index: int, engine: HomedEngine, may_take_over: bool) -> tuple[EngineKeeper, bool]:
        """The keeper of an engine, and whether it was there already."""
        with self.lock:
            before, keeper = self.kept.get(index, (None, None))
            if keeper is not None and (before != engine or not may_take_over or keeper.look().state == "given up"):
                keeper.stop()
                keeper = None
            if keeper is not None:
                _take_over(keeper, engine.config)
                return keeper, True
            keeper = EngineKeeper(engine.make(*engine.arguments), engine.config)
            self.kept[index] = engine, keeper
            return keeper, False


def keep_engines(socket: Path) -> None:
    """Keep engines for whoever connects to the socket, until this process is ended."""
    home = _Home()
    socket.unlink(missing_ok=True)  # that of a home that was killed
    try:
        with Listener(str(socket), family="AF_UNIX", authkey=multiprocessing.current_process().authkey) as listener:
            while True:
                with suppress(OSError, EOFError, multiprocessing.AuthenticationError):  # whoever called was killed
                    connection = listener.accept()
                    threading.Thread(target=_serve, args=(home, connection), daemon=True).start()
    finally:
        for _, keeper in home.kept.values():
            keeper.stop()


_CALLS: dict[str, Callable[..., Any]] = {
    "address": lambda keeper: keeper.address,
    "start": EngineKeeper.start,
    "wait_until_ready": EngineKeeper.wait_until_ready,
    "look": EngineKeeper.look,
    "fail": EngineKeeper.fail,
    "survived": EngineKeeper.survived,
    "let_start": EngineKeeper.let_start,
}


def _serve(home: _Home, connection: Connection) -> None:
    """Answer one rank's calls about its engine, until it hangs up."""
    keeper: EngineKeeper | None = None

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def answer(call: str, arguments: tuple[Any, ...]) -> None:
        nonlocal keeper
        try:
            if call == "keep":
                keeper, was_there = home.keep(*arguments)
                answers.put((keeper.look() if was_there else None, None))
            else:
                answers.put((_CALLS[call](keeper, *arguments), None))
        except VapoError as error:
            answers.put((None, error))
        except Exception:
            answers.put((None, RunFailed(f"the process that keeps the engines: {traceback.format_exc()}")))

    with suppress(EOFError, OSError), connection:
        while True:
            call, arguments = connection.recv()
            threading.Thread(target=answer, args=(call, arguments), daemon=True).start()
            message: Any = _STILL_AT_WORK
            while message == _STILL_AT_WORK:
                with suppress(queue.Empty):
                    message = answers.get(timeout=_STILL_SECONDS)
                connection.send(message)


def _take_over(keeper: EngineKeeper, config: RolloutConfig) -> None:
    if keeper.look().state == "serving":
        try:
            asyncio.run(take_over(keeper.address, config.health.answer_s))
            _logger.info("engine %s is taken over", keeper.address.url)
        except VapoError as error:
            keeper.fail(str(error))


class HomedKeeper:
    """An EngineKeeper in the home, with its calls.

    Args:
        home: the socket.
        index: of the engine.
        engine: what it is made of.
        may_take_over: whether one that runs already may be used.

    Raises:
        HomeLost: here and in every call, where the home is gone, stopped or hangs.
        BadInput: see EngineServer.
    """

    def __init__(self, home: Path, index: int, engine: HomedEngine, may_take_over: bool) -> None:
        self._lock = threading.Lock()
        self._seconds = engine.config.start_timeout_s + _ANSWER_SECONDS
        self._connection = _connect(home)
        before: Kept | None = self._ask("keep", index, engine, may_take_over)
        self.taken_over = before is not None
        self._told = before.failures if before is not None else 0  # to ranks that are gone

    @property
    def address(self) -> EngineAddress:
        """See EngineKeeper."""
        address: EngineAddress = self._ask("address")
        return address

    def start(self) -> None:
        """See EngineKeeper; nothing where it runs already."""
        self._ask("start")

    def wait_until_ready(self) -> None:
        """See EngineKeeper."""
        self._ask("wait_until_ready")

    def look(self) -> Kept:
        """See EngineKeeper; failures are those since this object was made."""
        kept: Kept = self._ask("look")
        return replace(kept, failures=kept.failures - self._told)

    def fail(self, cause: str, served: bool = True) -> None:
        """See EngineKeeper."""
        self._ask("fail", cause, served)

    def survived(self) -> None:
        """See EngineKeeper."""
        self._ask("survived")

    def let_start(self, allowed: bool) -> None:
        """See EngineKeeper."""
        self._ask("let_start", allowed)

    def stop(self) -> None:
        """Use it no more; it runs on, and ends with the home."""
        self._connection.close()

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self._connection.send((call, arguments))
                answer, error = self._receive(call)
        except (OSError, EOFError) as gone:
            raise _lost("is gone") from gone
        if error is not None:
            raise error
        return answer

    def _receive(self, call: str) -> tuple[Any, VapoError | None]:
        end = time.monotonic() + self._seconds
        while self._connection.poll(_SILENT_SECONDS):
            message: Any = self._connection.recv()
            if message != _STILL_AT_WORK:
                answer, error = message
                return answer, error
            if time.monotonic() > end:
                raise _lost(f"hangs: it has been at {call} for {self._seconds:.0f} s")
        raise _lost(f"is stopped: it has said nothing for {_SILENT_SECONDS:.0f} s")


def _connect(home: Path) -> Connection:
    """A connection to the home, which may still be starting."""
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection = Client(str(home), family="AF_UNIX")
            if not connection.poll(_SILENT_SECONDS):  # the system takes calls for a process that is stopped
                raise _lost(f"is stopped: it has said nothing for {_SILENT_SECONDS:.0f} s")
            # What Client() does with a key, which would wait for ever.
            answer_challenge(connection, multiprocessing.current_process().authkey)
            deliver_challenge(connection, multiprocessing.current_process().authkey)
            return connection
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            if time.monotonic() > end:
                raise _lost("is gone") from error
            time.sleep(_POLL_SECONDS)


def _lost(how: str) -> HomeLost:
    return HomeLost(
        f"the process that keeps the engines (engine-home in `ps`) {how}: start the same command again with "
        "run.resume=auto",
        shared=True,
    )
