"""Engines that outlive the ranks that use them: a process beside the ranks keeps them, and is asked through a socket.

Ranks that are started again find their engines running; what earlier ranks have begun on them ends (take_over).
"""

import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.client import EngineClient, ask
from vapo_megatron.engines.inside.heartbeat import stands_still
from vapo_megatron.engines.keeper import EngineKeeper, Kept
from vapo_megatron.engines.server import EngineAddress, EngineServer
from vapo_megatron.errors import RunFailed, TryAgain, VapoError

_logger = logging.getLogger(__name__)

# Until the home listens: where processes are spawned it imports first.
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.5
# A whole job may be stopped for a moment, and its ranks may go on before the home does.
_STOPPED_SECONDS = 15.0
# A call that takes longer, beside what a server may take to start, hangs in the home.
_ANSWER_SECONDS = 120.0


class HomeLost(TryAgain):
    """The process that keeps the engines is gone or does not answer: another one has to take its place."""


# Engines in the home by their number, each with all that it was made of.
_Kept = dict[int, tuple[tuple[Any, ...], EngineKeeper]]


def keep_engines(socket: Path) -> None:
    """Keep engines for whoever connects to the socket, until this process is ended."""
    engines: _Kept = {}
    lock = threading.Lock()
    socket.unlink(missing_ok=True)  # that of a home that was killed
    try:
        with Listener(str(socket), family="AF_UNIX", authkey=multiprocessing.current_process().authkey) as listener:
            while True:
                with suppress(OSError, EOFError, multiprocessing.AuthenticationError):  # whoever called was killed
                    connection = listener.accept()
                    threading.Thread(target=_serve, args=(engines, lock, connection), daemon=True).start()
    finally:
        for _, keeper in engines.values():
            keeper.stop()


def _serve(engines: _Kept, lock: threading.Lock, connection: Connection) -> None:
    """Answer one rank's calls about its engine, until it hangs up."""
    keeper: Any = None
    with suppress(EOFError, OSError), connection:
        connection.send(os.getpid())
        while True:
            call, arguments = connection.recv()
            answer, error = None, None
            try:
                if call == "keep":
                    with lock:
                        keeper, answer = _keep(engines, *arguments)
                elif call == "address":
                    answer = keeper.address
                else:
                    answer = getattr(keeper, call)(*arguments)
            except VapoError as raised:
                error = raised
            except Exception:
                error = RunFailed(f"the process that keeps the engines: {traceback.format_exc()}")
            connection.send((answer, error))


def _keep(engines: _Kept, index: int, recipe: tuple[Any, ...], may_take_over: bool) -> tuple[EngineKeeper, Kept | None]:
    """The keeper of an engine, and how it is where it was there already."""
    if index in engines:
        before, keeper = engines[index]
        if before == recipe and may_take_over and keeper.look().state != "given up":
            _take_over(keeper, recipe[0])
            return keeper, keeper.look()
        keeper.stop()
    config, make, *arguments = recipe
    engines[index] = recipe, EngineKeeper(make(*arguments), config)
    return engines[index][1], None


def _take_over(keeper: EngineKeeper, config: RolloutConfig) -> None:
    if keeper.look().state == "serving":
        try:
            ask(keeper.address, EngineClient.take_over, config.health.answer_s)
            _logger.info("engine %s is taken over", keeper.address.url)
        except VapoError as error:
            keeper.fail(str(error))


class HomedKeeper:
    """An EngineKeeper in the home, with its calls.

    Args:
        home: the socket.
        index: of the engine.
        config: the rollout section.
        make: called in the home with the arguments; a function of a module that returns the server.
        may_take_over: whether one that runs already, and was made of the same, may be used.

    Raises:
        HomeLost: here and in every call, where the home is gone, stopped or hangs.
        BadInput: see EngineServer.
    """

    def __init__(
        self,
        home: Path,
        index: int,
        config: RolloutConfig,
        make: Callable[..., EngineServer],
        arguments: tuple[Any, ...],
        may_take_over: bool,
    ) -> None:
        self._lock = threading.Lock()
        self._seconds = config.start_timeout_s + _ANSWER_SECONDS
        self._connection, self._pid = _connect(home)
        before: Kept | None = self._ask("keep", index, (config, make, *arguments), may_take_over)
        self.taken_over = before is not None
        self._reported_failures = before.failures if before is not None else 0  # to ranks that are gone
        self.start, self.wait_until_ready, self.fail, self.survived, self.let_start = (
            partial(self._ask, call) for call in ("start", "wait_until_ready", "fail", "survived", "let_start")
        )

    @property
    def address(self) -> EngineAddress:
        """See EngineKeeper."""
        address: EngineAddress = self._ask("address")
        return address

    def look(self) -> Kept:
        """See EngineKeeper; failures are those since this object was made."""
        kept: Kept = self._ask("look")
        return replace(kept, failures=kept.failures - self._reported_failures)

    def stop(self) -> None:
        """Use it no more; it runs on, and ends with the home."""
        self._connection.close()

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self._connection.send((call, arguments))
                self._wait_for_answer(call)
                answer, error = self._connection.recv()
        except (OSError, EOFError) as gone:
            raise _lost("is gone") from gone
        if error is not None:
            raise error
        return answer

    def _wait_for_answer(self, call: str) -> None:
        start = seen = time.monotonic()
        while not self._connection.poll(_LOOK_SECONDS):
            now = time.monotonic()
            if stands_still(self._pid) is None:
                seen = now
            elif now - seen > _STOPPED_SECONDS:
                raise _lost(f"is stopped: it has done nothing for {_STOPPED_SECONDS:.0f} s")
            if now - start > self._seconds:
                raise _lost(f"hangs: it has been at {call} for {self._seconds:.0f} s")


def _connect(home: Path) -> tuple[Connection, int]:
    """A connection to the home, which may still be starting, and its process."""
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection = Client(str(home), family="AF_UNIX")
            if not connection.poll(_STOPPED_SECONDS):  # the system takes calls for a process that is stopped
                raise _lost(f"is stopped: it has done nothing for {_STOPPED_SECONDS:.0f} s")
            # What Client() does with a key, which would wait for ever.
            answer_challenge(connection, multiprocessing.current_process().authkey)
            deliver_challenge(connection, multiprocessing.current_process().authkey)
            return connection, connection.recv()
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
