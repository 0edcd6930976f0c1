"""Watches one server: kills it when it is dead, stopped, silent or wrong, and has it restarted.

The server belongs to this run (EngineServer) or to another owner (ExternalServer), who restarts it;
until then it gets no work. The address stays the same. Requests to a killed server fail at once
with a broken connection. A restarted server has no weights of this run (NO_WEIGHTS) until the next
weight sync.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.external_server import ExternalServer, ask_health
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.connection import REQUEST_SECONDS
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput

_logger = logging.getLogger(__name__)

State = Literal["starting", "serving", "waiting", "given up"]

_POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Seconds between two looks at a server and its processes."""
# The longest time without a batch while requests are waiting.
_PROGRESS_SECONDS = 120.0
# Kernels are compiled on first use, which takes minutes without a cache and is not reported by
# SGLang.
_FIRST_BATCHES = 100


@dataclass(frozen=True)
class EngineStatus:
    """State of a server, to be sent to other ranks.

    Attributes:
        url: the server's URL.
        state: what its keeper does with it.
        failures: number of failures since the run started.
        in_a_row: the latest of them, between which the server neither survived from one sync to the
            next nor served correctly for rollout.start_timeout_s.
        cause: cause of the latest failure.
        interrupted: starts that let_start(False) stopped, since the server last served or failed.
    """

    url: str
    state: State
    failures: int
    in_a_row: int
    cause: str
    interrupted: int = 0


class EngineKeeper:
    """A thread that keeps one server running, in the process that owns or feeds it.

    Its methods may be called from any thread.

    Args:
        server: the server, not started yet.
        config: the rollout section.
        start_timeout_s: seconds until a restarted server must serve; None: rollout.start_timeout_s.

    Attributes:
        on_lost: called with the server's URL when it fails, from any thread.
    """

    def __init__(
        self,
        server: EngineServer | ExternalServer,
        config: RolloutConfig,
        start_timeout_s: float | None = None,
    ) -> None:
        if start_timeout_s is None:
            start_timeout_s = config.start_timeout_s
        self._start_seconds = start_timeout_s
        self.on_lost: Callable[[str], None] | None = None
        self._server = server
        self._config = config
        self._health = config.health
        self._lock = threading.RLock()
        self._first_start = threading.Lock()
        self._stop = threading.Event()
        self._begun = False
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self._state: State = "starting"
        self._may_start = True
        self._failures = 0
        self._in_a_row = 0
        self._cause = ""
        self._interrupted = 0
        # Times of the latest such event (time.monotonic()).
        self._answered = 0.0
        self._started = 0.0
        self._served = 0.0
        self._ended = 0.0

    @property
    def leads(self) -> bool:
        """Whether requests go to the server; not to a part on a further node."""
        return self._server.leads

    @property
    def address(self) -> EngineAddress:
        """The server's address, valid once started. Restarts do not change it."""
        return self._server.address

    def start(self) -> None:
        """Start the server unless it was started, and return at once. wait_until_ready()
        follows."""
        with self._lock:
            if not self._begun:
                self._server.start()
                self._begun = True

    def wait_until_ready(self) -> None:
        """Return when the server answers or is given up. From then on it is watched.

        Raises:
            RunFailed: see EngineServer.wait_until_ready. A server whose first start fails is not
                restarted.
        """
        with self._first_start:
            if not self._thread.is_alive():
                self._server.wait_until_ready()
                self._note_serving()
                self._thread.start()
        while self._state in ("starting", "waiting") and not self._stop.wait(_POLL_SECONDS):
            pass

    def _note_serving(self) -> None:
        self._state = "serving"
        self._interrupted = 0
        if not self._server.leads:  # the first part's keeper counts the server's failures
            self._in_a_row = 0
        self._served = time.monotonic()
        self._answered = self._served

    def status(self) -> EngineStatus:
        """State of the server."""
        with self._lock:
            return EngineStatus(
                self.address.url,
                self._state,
                self._failures,
                self._in_a_row,
                self._cause,
                self._interrupted,
            )

    def is_unhealthy(self) -> bool:
        """Whether the server reports a problem or does not answer."""
        if not self._server.leads:  # the first part's keeper asks the server
            return False
        health = ask_health(self.address, LOOK_SECONDS)
        return health is None or fault_of(health, self._config) is not None

    def fail(self, cause: str, served: bool = True) -> None:
        """Kill a server that is wrong, and restart it.

        Args:
            cause: the fault, in words.
            served: whether it worked correctly until now. One with wrong answers did not, however
                long it ran.
        """
        with self._lock:
            if self._state == "serving":
                self._replace(cause, served)

    def survived(self) -> None:
        """The server served from one weight sync to the next: its earlier failures no longer
        count."""
        with self._lock:
            self._in_a_row = 0

    def let_start(self, allowed: bool) -> None:
        """Allow or forbid starts. If forbidden, a server that is starting is stopped, to be started
        later."""
        with self._lock:
            self._may_start = allowed
            if not allowed and self._state == "starting":
                self._server.end("it may not start now")
                self._state = "waiting"
                self._interrupted += 1

    def stop(self) -> None:
        """Stop the server; it is not restarted."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._server.close()

    def _keep(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._look()
        except Exception as error:  # otherwise callers would wait for the server forever
            _logger.exception("engine %s is no longer watched", self.address.url)
            with self._lock:
                self._failures += 1
                self._in_a_row += 1
                self._cause = (
                    f"{self.address.url}: its keeper failed ({type(error).__name__}: {error})"
                )
                try:
                    self._server.stop()
                except Exception:
                    _logger.exception("engine %s could not be stopped", self.address.url)
                self._state = "given up"
            if self.on_lost is not None:
                self.on_lost(self.address.url)

    def _look(self) -> None:
        # May take seconds, so not under the lock.
        is_ready = self._state == "starting" and self._server.is_ready()
        with self._lock:
            if self._state != "given up" and self._server.is_closed():
                self._give_up("its part on another node has ended and will not be started again")
            elif self._state == "waiting" and self._may_start:
                self._start_again()
            elif self._state == "starting":
                self._look_at_start(is_ready)
        if self._state == "serving" and (cause := self._fault()) is not None:
            self.fail(cause)

    def _fault(self) -> str | None:
        """The fault of a serving server; None if it has none.

        May take seconds, so not under the lock.
        """
        if (ended := self._server.ended()) is not None:
            return f"its HTTP server exited ({ended})"
        if (lost := self._server.lost()) is not None:
            return lost
        if not self._server.leads:
            return None
        now = time.monotonic()
        health = ask_health(self.address, LOOK_SECONDS)
        if health is None:
            silent = now - self._answered
            limit = self._health.answer_s
            if silent > limit:
                return f"it has not answered for {silent:.0f} s (limit {limit:g} s)"
            return None
        self._answered = now
        return fault_of(health, self._config)

    def _replace(self, cause: str, served: bool = True) -> None:
        seconds_served = time.monotonic() - self._served
        if served and self._state == "serving" and seconds_served > self._config.start_timeout_s:
            self._in_a_row = 0
        self._interrupted = 0
        self._failures += 1
        self._in_a_row += 1
        self._cause = cause if is_named(self.address.url, cause) else f"{self.address.url}: {cause}"
        given_up = self._in_a_row > self._health.max_failures
        consequence = "other engines take over its groups until it serves again"
        if given_up:
            consequence = "it will not be restarted"
        if self.on_lost is not None:
            self.on_lost(self.address.url)
        log = self._server.end(cause)
        self._ended = time.monotonic()
        _logger.warning(
            "engine %s; it was killed (log: %s) and %s; failures in a row: %d",
            self._cause,
            log,
            consequence,
            self._in_a_row,
        )
        self._state = "given up" if given_up else "waiting"
        if not given_up and self._may_start:
            self._start_again()

    def _give_up(self, cause: str) -> None:
        self._cause = f"{self.address.url}: {cause}"
        if self.on_lost is not None:
            self.on_lost(self.address.url)
        self._server.stop()
        self._state = "given up"

    def _start_again(self) -> None:
        self._state = "starting"
        self._started = time.monotonic()
        try:
            self._server.start_again()
        except (BadInput, OSError) as error:
            # Its port, which the old server may hold for a moment longer; a full disk.
            _logger.info("engine %s: %s", self.address.url, error)
            self._state = "waiting"
            if time.monotonic() > self._ended + self._start_seconds:
                self._replace(str(error))

    def _look_at_start(self, is_ready: bool) -> None:
        seconds = time.monotonic() - self._started
        limit = self._start_seconds
        if (ended := self._server.ended()) is not None:
            self._replace(f"it exited while starting ({ended})")
        elif (elsewhere := self._server.lost_elsewhere()) is not None:
            self._replace(elsewhere)
        elif is_ready:
            self._note_serving()
            _logger.info("engine %s serves again after %.1f s", self.address.url, seconds)
        elif seconds > limit:
            self._replace(f"it did not answer within rollout.start_timeout_s={limit:g} s")


def fault_of(health: dict[str, Any], config: RolloutConfig) -> str | None:
    """The problem in a server's own report (inside/heartbeat.py), in words; None without one."""
    if health["lost"]:
        return str(health["lost"][0])
    limit = _PROGRESS_SECONDS
    situation = ""
    if health["batches"] < _FIRST_BATCHES:
        limit = max(limit, config.start_timeout_s)
        situation = f", in its first {_FIRST_BATCHES} batches"
    if health["paused"]:
        limit = max(limit, config.start_timeout_s, REQUEST_SECONDS)
        situation = ", paused for a weight sync"
    silent = health["silent_s"]
    if silent > limit:
        return (
            f"{health['requests']} requests are waiting and no batch has finished for {silent:.0f} "
            f"s (limit {limit:g} s{situation})"
        )
    return None


def is_named(url: str, cause: str) -> bool:
    """Whether a cause names the server at this URL, not one whose port starts with the same
    digits."""
    return re.search(rf"{re.escape(url)}(?!\d)", cause) is not None
