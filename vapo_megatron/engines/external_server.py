"""An engine that another process starts and restarts, and requests about a server's health."""

import contextlib
import logging
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from vapo_megatron.deadlines import NO_ANSWER, ask
from vapo_megatron.engines.inside.heartbeat import END_PATH, HEALTH_PATH
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import VapoError
from vapo_megatron.files import parse_json

_logger = logging.getLogger(__name__)

_READY_SECONDS = 1.0
_END_SECONDS = 5.0


class ExternalServer:
    """An engine started and restarted by another process.

    Args:
        address: the engine's address.
        take_back: called with the address once the engine answers again; raises a VapoError if it
            no longer fits this run.
    """

    def __init__(self, address: EngineAddress, take_back: Callable[[EngineAddress], None]) -> None:
        self.address = address
        self._take_back = take_back
        self._refusal = ""
        self.leads = True

    def _leave_to_owner(self) -> None: ...

    # Its owner watches, starts and stops its process.
    start = wait_until_ready = start_again = stop = close = _leave_to_owner
    ended = lost = lost_elsewhere = _leave_to_owner

    def is_closed(self) -> bool:
        """Its owner may start it again at any time."""
        return False

    def end(self, cause: str) -> Path:
        """Ask the engine to exit."""
        end_server(self.address, cause)
        return Path(self.address.log_file)

    def is_ready(self) -> bool:
        """Whether the engine is back and taken over. One that no longer fits this run is not."""
        health = ask_health(self.address, _READY_SECONDS)
        if health is None or health["lost"]:
            return False
        try:
            self._take_back(self.address)
        except VapoError as error:
            if str(error) != self._refusal:
                _logger.warning("engine %s cannot be used again: %s", self.address.url, error)
            self._refusal = str(error)
            return False
        return True


def ask_health(address: EngineAddress, timeout: float) -> dict[str, Any] | None:
    """A server's report about itself; None if it does not answer within timeout (seconds)."""
    try:
        url = f"{address.url}/{HEALTH_PATH}"
        answer = ask(url, max(timeout, 1.0), headers=_headers(address))
        health = parse_json(answer.content)
    except NO_ANSWER:
        return None
    if answer.status == HTTPStatus.OK and isinstance(health, dict) and "lost" in health:
        return health
    return None


def end_server(address: EngineAddress, cause: str) -> None:
    """Ask a server that is wrong to exit; its owner restarts it."""
    url = f"{address.url}/{END_PATH}?{urllib.parse.urlencode({'cause': cause})}"
    with contextlib.suppress(*NO_ANSWER):  # it exited before it could answer
        ask(url, _END_SECONDS, method="POST", headers=_headers(address))


def _headers(address: EngineAddress) -> dict[str, str]:
    if address.key:
        return {"Authorization": f"Bearer {address.key}"}
    return {}
