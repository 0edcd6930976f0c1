"""Watches one server: ends it when it is dead, stopped, silent or wrong, and has it restarted.

The server belongs to this run (EngineServer) or to another owner (ExternalServer), who then restarts it; until then it
gets no work. The address stays the same. Requests to a server that is ended fail at once, by a broken connection. A
restarted server has no weights of this run (NO_WEIGHTS) until the next weight sync.
"""

import contextlib
import http.client
import json
import logging
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.inside.heartbeat import END_PATH, HEALTH_PATH
from vapo_megatron.engines.server.client import REQUEST_SECONDS
from vapo_megatron.engines.server.process import DIRECT, EngineAddress, EngineServer
from vapo_megatron.errors import BadInput, VapoError

_logger = logging.getLogger(__name__)

State = Literal["starting", "serving", "waiting", "given up"]

_POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Between two looks at a server and its processes."""
# The longest time without a batch while there are requests.
_PROGRESS_SECONDS = 120.0
# Kernels are compiled on first use, which takes minutes without a cache; SGLang does not report it.
_FIRST_BATCHES = 100
NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""Raised when a server does not answer, or not completely."""


@dataclass(frozen=True)
class Kept:
    """State of a server, to be sent to other ranks.

    failures: so far. in_a_row: the latest of them, between which the server neither survived from one sync to the
    next nor served correctly for rollout.start_timeout_s. cause: of the latest failure.
    """

    url: str
    state: State
    failures: int
    in_a_row: int
    cause: str


class ExternalServer:
    """An engine that somebody else starts, and starts again.

    take_back: called with its address once it answers again; raises a VapoError if it does not fit this run any more.
    """

    def __init__(self, address: EngineAddress, take_back: Callable[[EngineAddress], None]) -> None:
        self.address, self._take_back, self._refusal = address, take_back, ""

    def _leave_to_owner(self) -> None: ...

    # Its owner sees its process, starts it and ends it.
    start = wait_until_ready = ended = lost = start_again = stop = _leave_to_owner

    def end(self, cause: str) -> Path:
        """Ask it to end."""
        end_server(self.address, cause)
        return Path(self.address.log_file)

    def is_ready(self) -> bool:
        """Whether it is back and taken over; an engine that does not fit this run any more is not."""
        health = ask_health(self.address, LOOK_SECONDS)
        if health is None or health["lost"]:
            return False
        try:
            self._take_back(self.address)
        except VapoError as error:
            if str(error) != self._refusal:
                _logger.warning("engine %s is not taken back: %s", self.address.url, error)
            self._refusal = str(error)
            return False
        return True


class EngineKeeper:
    """A thread of the process that owns or feeds a server. Its methods may be called from any thread.

    Args:
        server: the server to keep, not started yet.
        config: the rollout section.
        start_timeout_s: seconds until a server that was started again must serve.

    Attributes:
        when_lost: called with the server's URL when it fails, from any thread.
    """

    def __init__(
        self, server: EngineServer | ExternalServer, config: RolloutConfig, start_timeout_s: float | None = None
    ) -> None:
        self._start_seconds = config.start_timeout_s if start_timeout_s is None else start_timeout_s
        self.when_lost: Callable[[str], None] | None = None
        self._server, self._config, self._health = server, config, config.health
        self._lock, self._first, self._stop = threading.RLock(), threading.Lock(), threading.Event()
        self._begun = False
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self._state: State = "starting"
        self._may_start = True
        self._failures = self._in_a_row = 0
        self._cause = ""
        self._answered = self._started = self._served = self._ended = 0.0

    @property
    def address(self) -> EngineAddress:
        """The server's address, valid once started; it stays the same when the server is started again."""
        return self._server.address

    def start(self) -> None:
        """Begin to start the server, once; wait_until_ready() follows."""
        with self._lock:
            if not self._begun:
                self._server.start()
                self._begun = True

    def wait_until_ready(self) -> None:
        """Return when the server answers or is given up; from then on it is kept.

        Raises:
            RunFailed: see EngineServer.wait_until_ready. A server whose first start fails is not started again.
        """
        with self._first:
            if not self._thread.is_alive():
                self._server.wait_until_ready()
                self._state = "serving"
                self._served = self._answered = time.monotonic()
                self._thread.start()
        while self._state in ("starting", "waiting") and not self._stop.wait(_POLL_SECONDS):
            pass

    def look(self) -> Kept:
        """State of the server."""
        with self._lock:
            return Kept(self.address.url, self._state, self._failures, self._in_a_row, self._cause)

    def is_unhealthy(self) -> bool:
        """Whether the server reports a problem or does not answer."""
        health = ask_health(self.address, LOOK_SECONDS)
        return health is None or what_is_wrong(health, self._config) is not None

    def fail(self, cause: str, served: bool = True) -> None:
        """End a server that is wrong, and start it again.

        served: whether it worked correctly until now; one with wrong answers did not, however long it ran.
        """
        with self._lock:
            if self._state == "serving":
                self._replace(cause, served)

    def survived(self) -> None:
        """The server has served from one weight sync to the next: forget earlier failures."""
        with self._lock:
            self._in_a_row = 0

    def let_start(self, allowed: bool) -> None:
        """Allow or forbid starts; a server that is starting and may not is ended, to be started later."""
        with self._lock:
            self._may_start = allowed
            if not allowed and self._state == "starting":
                self._server.stop()
                self._state = "waiting"

    def stop(self) -> None:
        """End the server for good."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._server.stop()

    def _keep(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._look()
        except Exception as error:  # else callers would wait for the server for ever
            _logger.exception("engine %s is not kept any more", self.address.url)
            with self._lock:
                self._failures += 1
                self._in_a_row += 1
                self._cause = f"{self.address.url}: its keeper failed ({type(error).__name__}: {error})"
                try:
                    self._server.stop()
                except Exception:
                    _logger.exception("engine %s could not be ended", self.address.url)
                self._state = "given up"
            if self.when_lost is not None:
                self.when_lost(self.address.url)

    def _look(self) -> None:
        is_ready = self._state == "starting" and self._server.is_ready()  # may take seconds: not under the lock
        with self._lock:
            if self._state == "waiting" and self._may_start:
                self._start_again()
            elif self._state == "starting":
                self._look_at_start(is_ready)
        if self._state == "serving" and (cause := self._wrong()) is not None:
            self.fail(cause)

    def _wrong(self) -> str | None:
        """The fault of a serving server; None if it has none. Not under the lock: it may take seconds."""
        if (ended := self._server.ended()) is not None:
            return f"its HTTP server ended ({ended})"
        if (lost := self._server.lost()) is not None:
            return lost
        now = time.monotonic()
        health = ask_health(self.address, LOOK_SECONDS)
        if health is None:
            silent = now - self._answered
            limit = self._health.answer_s
            return f"it has not answered for {silent:.0f} s (limit {limit:g} s)" if silent > limit else None
        self._answered = now
        return what_is_wrong(health, self._config)

    def _replace(self, cause: str, served: bool = True) -> None:
        if served and self._state == "serving" and time.monotonic() - self._served > self._config.start_timeout_s:
            self._in_a_row = 0
        self._failures += 1
        self._in_a_row += 1
        self._cause = cause if is_named(self.address.url, cause) else f"{self.address.url}: {cause}"
        given_up = self._in_a_row > self._health.max_failures
        then = "it is given up" if given_up else "other engines get its groups until it serves again"
        if self.when_lost is not None:
            self.when_lost(self.address.url)
        log = self._server.end(cause)
        self._ended = time.monotonic()
        _logger.warning(
            "engine %s; it was ended (log: %s) and %s; failures in a row: %d", self._cause, log, then, self._in_a_row
        )
        self._state = "given up" if given_up else "waiting"
        if not given_up and self._may_start:
            self._start_again()

    def _start_again(self) -> None:
        self._state, self._started = "starting", time.monotonic()
        try:
            self._server.start_again()
        except (BadInput, OSError) as error:  # its port, which the old server may have for a moment; a full disk
            _logger.info("engine %s: %s", self.address.url, error)
            self._state = "waiting"
            if time.monotonic() > self._ended + self._start_seconds:
                self._replace(str(error))

    def _look_at_start(self, is_ready: bool) -> None:
        seconds, limit = time.monotonic() - self._started, self._start_seconds
        if (ended := self._server.ended()) is not None:
            self._replace(f"it ended while starting ({ended})")
        elif is_ready:
            self._state = "serving"
            self._served = self._answered = time.monotonic()
            _logger.info("engine %s serves again after %.1f s", self.address.url, seconds)
        elif seconds > limit:
            self._replace(f"it did not answer within rollout.start_timeout_s={limit:g} s")


def what_is_wrong(health: dict[str, Any], config: RolloutConfig) -> str | None:
    """The problem in a server's own report (inside/heartbeat.py), in words; None if all is well."""
    if health["lost"]:
        return str(health["lost"][0])
    limit, which = _PROGRESS_SECONDS, ""
    if health["batches"] < _FIRST_BATCHES:
        limit, which = max(limit, config.start_timeout_s), f", in its first {_FIRST_BATCHES} batches"
    if health["paused"]:
        limit, which = max(limit, config.start_timeout_s, REQUEST_SECONDS), ", paused for a weight sync"
    requests, silent = health["requests"], health["silent_s"]
    if silent > limit:
        return f"{requests} requests wait and no batch has ended for {silent:.0f} s (limit {limit:g} s{which})"
    return None


def is_named(url: str, cause: str) -> bool:
    """Whether a cause names the server at this URL, not one whose port begins with the same digits."""
    return re.search(rf"{re.escape(url)}(?!\d)", cause) is not None


def ask_health(address: EngineAddress, timeout: float) -> dict[str, Any] | None:
    """A server's report about itself; None if it does not answer in time (seconds)."""
    try:
        with DIRECT.open(_request(address, HEALTH_PATH), timeout=max(timeout, 1.0)) as answer:
            health = json.load(answer)
            return health if isinstance(health, dict) and "lost" in health else None
    except NO_ANSWER:
        return None


def end_server(address: EngineAddress, cause: str) -> None:
    """Ask a server that is wrong to end; its owner starts it again."""
    request = _request(address, f"{END_PATH}?{urllib.parse.urlencode({'cause': cause})}")
    request.method = "POST"
    with contextlib.suppress(*NO_ANSWER):  # it ended before it could answer
        DIRECT.open(request, timeout=5).close()


def _request(address: EngineAddress, path: str) -> urllib.request.Request:
    headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
    return urllib.request.Request(f"{address.url}/{path}", headers=headers)
