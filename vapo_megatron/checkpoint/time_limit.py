"""Whether the time that is left suffices for another stretch of work and a save."""

import time
from collections.abc import Callable

import psutil


class TimeLimit:
    """Watches a deadline; times are seconds of the given clock."""

    def __init__(self, deadline: float | None, margin: float, clock: Callable[[], float] = time.time) -> None:
        """deadline None: there is none. margin: left besides the longest stretch and the longest save."""
        self._deadline, self._margin, self._clock = deadline, margin, clock
        # Of this attempt: an evaluation or an export comes once in many steps, and comes again.
        self._longest_stretch = self._longest_save = 0.0
        self._last: float | None = None

    def reached_point(self) -> None:
        """The run is where it could end; the time since the last such point counts as a stretch."""
        now = self._clock()
        if self._last is not None:
            self._longest_stretch = max(self._longest_stretch, now - self._last)
        self._last = now

    def left_point(self) -> None:
        """The run goes on; what happened at the point (a save) does not count as work."""
        self._last = self._clock()

    def saved(self, seconds: float) -> None:
        """A save took this long, from its begin until it was committed."""
        self._longest_save = max(self._longest_save, seconds)

    @property
    def is_short(self) -> bool:
        """Whether another stretch might not end, and be saved, before the deadline."""
        if self._deadline is None:
            return False
        needed = self._longest_stretch + self._longest_save + self._margin
        return self._clock() + needed > self._deadline


def earliest_deadline(started: float, limit_s: float | None, job_end: float | None) -> float | None:
    """The earlier of the config's limit, counted from `started`, and the job's end (Unix times); None for neither."""
    ends = [job_end] if job_end is not None else []
    if limit_s is not None:
        ends.append(started + limit_s)
    return min(ends, default=None)


def process_start() -> float:
    """When this process started (Unix time); loading models and starting engines takes minutes of a time limit."""
    return float(psutil.Process().create_time())
