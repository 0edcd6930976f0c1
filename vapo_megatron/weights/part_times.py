"""How long the parts of an export take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class PartTimes:
    """Seconds by part. On a GPU what a part enqueues on its stream is timed, and read only when asked for."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = Lock()  # a part may be at work in several threads
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str, device: torch.device | None = None) -> Iterator[None]:
        """Add what happens inside to a part; on a CUDA device its current stream's time, else wall-clock time."""
        if device is None or device.type != "cuda":
            start = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, time.perf_counter() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by part so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1e3)
        self._events.clear()
        return dict(self._seconds)
