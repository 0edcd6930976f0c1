"""Engines in the order in which they get the next group of prompts."""

import bisect
from collections.abc import Sequence

from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.rollout.request import GroupRequest


class EngineLoad:
    """An engine and its unfinished work.

    Attributes:
        client: sends requests to the engine.
        requests: number of unfinished responses.
        tokens: largest number of tokens of their groups (GroupRequest.max_tokens).
        lost: whether the engine is out of rotation.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.requests = 0
        self.tokens = 0
        self.lost = False
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def url(self) -> str:
        """The engine's URL."""
        return self.client.address.url

    def add(self, group: GroupRequest, now: float) -> None:
        """The group becomes this engine's work. now: the event loop's time."""
        if self.requests == 0:
            self._busy_since = now
        self.requests += group.samples
        self.tokens += group.max_tokens

    def remove(self, group: GroupRequest, now: float) -> None:
        """The group is no longer this engine's work, finished or not."""
        self.requests -= group.samples
        self.tokens -= group.max_tokens
        if self.requests == 0:
            self._busy_seconds += now - self._busy_since

    def busy_seconds(self, now: float) -> float:
        """Seconds in which the engine had work."""
        if self.requests:
            return self._busy_seconds + now - self._busy_since
        return self._busy_seconds


class EngineQueue:
    """Picks the engine for a group: the one with the fewest outstanding tokens that has room for
    it.

    Engines that are full or out of rotation are not looked at. Call update() after each change of
    an engine's work or of `lost`.

    Args:
        engines: all engines; of several with as many tokens the first one is picked.
        most_requests: largest number of unfinished responses of an engine. An idle engine takes a
            group of any size.
    """

    def __init__(self, engines: Sequence[EngineLoad], most_requests: int) -> None:
        self._engines = engines
        self._most_requests = most_requests
        self._places = {engine: place for place, engine in enumerate(engines)}
        self._by_url = {engine.url: place for place, engine in enumerate(engines)}
        # (tokens, place) of each engine with room for a group of this many responses, sorted.
        self._samples = 1
        self._order: list[tuple[int, int]] = []
        self._entries: dict[int, tuple[int, int]] = {}
        self._sort()

    def pick(self, samples: int, preferred: str = "") -> EngineLoad | None:
        """The engine for a group of this many responses; None if no engine has room.

        Args:
            samples: number of responses.
            preferred: URL of the engine to pick if it has room.
        """
        if samples != self._samples:
            self._samples = samples
            self._sort()
        place = self._by_url.get(preferred)
        if place is not None and place in self._entries:
            return self._engines[place]
        if not self._order:
            return None
        return self._engines[self._order[0][1]]

    def update(self, engine: EngineLoad) -> None:
        """The engine's work, or whether it is in rotation, has changed."""
        place = self._places[engine]
        entry = self._entries.pop(place, None)
        if entry is not None:
            del self._order[bisect.bisect_left(self._order, entry)]
        if self._has_room(engine):
            entry = (engine.tokens, place)
            self._entries[place] = entry
            bisect.insort(self._order, entry)

    def _sort(self) -> None:
        self._entries = {
            place: (engine.tokens, place)
            for place, engine in enumerate(self._engines)
            if self._has_room(engine)
        }
        self._order = sorted(self._entries.values())

    def _has_room(self, engine: EngineLoad) -> bool:
        if engine.lost:
            return False
        return engine.requests == 0 or engine.requests + self._samples <= self._most_requests
