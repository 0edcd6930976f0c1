"""Watches an engine that this run did not start: whether it serves, is gone for now, or is back."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.keeper import LOOK_SECONDS, Kept, State, ask_health, end_server, is_named, what_is_wrong
from vapo_megatron.engines.remote_engines import check_identity, meet, take_over
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.errors import VapoError

_logger = logging.getLogger(__name__)


class EngineWatch:
    """A thread beside the rank that feeds an external engine, with the calls of an EngineKeeper.

    What ends is started again by the `vapo-megatron engine` that owns it, or by people; until then it is left out.
    One that comes back is asked again what it is, and taken over.

    Args:
        address: of the engine, which serves.
        config: the rollout section.
        agreed: what engine and trainer must have in common (what_must_agree).

    Attributes:
        when_lost: called with its URL where it fails, from any thread.
    """

    def __init__(self, address: EngineAddress, config: RolloutConfig, agreed: Mapping[str, JsonValue]) -> None:
        self._address, self._config, self._health, self._agreed = address, config, config.health, agreed
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._state: State = "serving"
        self._failures = self._in_a_row = 0
        self._cause = self._refused = ""
        self.when_lost: Callable[[str], None] | None = None
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._thread.start()

    def look(self) -> Kept:
        """How the engine is."""
        with self._lock:
            return Kept(self._address.url, self._state, self._failures, self._in_a_row, self._cause)

    def is_unhealthy(self) -> bool:
        """Whether it says so itself now, or says nothing."""
        found = ask_health(self._address, LOOK_SECONDS)
        return found is None or what_is_wrong(found, self._config) is not None

    def fail(self, cause: str) -> None:
        """The engine was found to be wrong: it is ended, if it can be, and left out until it is back."""
        self._lose(cause)

    def survived(self) -> None:
        """The engine has served from one weight sync to the next: earlier failures count no more."""
        with self._lock:
            self._in_a_row = 0

    def stop(self) -> None:
        """Watch no more; the engine lives on."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                if self._state == "serving":
                    self._see()
                elif self._state == "waiting" and not self.is_unhealthy():
                    self._take_back()
        except Exception as error:  # else nobody would hear of it
            _logger.exception("engine %s is not watched any more", self._address.url)
            self._lose(f"its watch failed ({type(error).__name__}: {error})", for_good=True)

    def _lose(self, cause: str, for_good: bool = False) -> None:
        with self._lock:
            if self._state != "serving" and not for_good:
                return
            self._failures += 1
            self._in_a_row += 1
            self._cause = cause if is_named(self._address.url, cause) else f"{self._address.url}: {cause}"
            given_up = for_good or self._in_a_row > self._health.max_failures
            self._state = "given up" if given_up else "waiting"
        if self.when_lost is not None:
            self.when_lost(self._address.url)
        end_server(self._address, cause)
        then = "it is not taken again" if given_up else "it is left out until it is back"
        _logger.warning("engine %s: %s, failure %d", self._cause, then, self._in_a_row)

    def _see(self) -> None:
        now, found = time.monotonic(), ask_health(self._address, LOOK_SECONDS)
        if found is not None:
            self._answered = now
            if (cause := what_is_wrong(found, self._config)) is not None:
                self.fail(cause)
        elif now - self._answered > self._health.answer_s:
            self.fail(f"no answer for {now - self._answered:.0f} s")

    def _take_back(self) -> None:
        async def ask() -> None:
            identity = await meet(self._address.url, self._address.key, self._health.answer_s)
            check_identity(self._address.url, identity, self._agreed)
            await take_over(self._address)

        try:
            asyncio.run(ask())
        except VapoError as error:
            if str(error) != self._refused:
                _logger.warning("engine %s is not taken back: %s", self._address.url, error)
            self._refused = str(error)
            return
        with self._lock:
            self._state, self._answered = "serving", time.monotonic()
        _logger.info("engine %s is back and gets weights at the next weight sync", self._address.url)
