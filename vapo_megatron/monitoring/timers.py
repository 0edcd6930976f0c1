"""Seconds and peak memory of the phases of a step."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch.profiler import record_function

from vapo_megatron import logs

_logger = logging.getLogger(__name__)

GIB = 2**30
_NOTE = "in the phase "


@dataclass(frozen=True)
class MemoryGauge:
    """Measures a high-water mark: `reset` starts over, `peak` returns the bytes reached since.

    For a CUDA device: MemoryGauge(torch.cuda.reset_peak_memory_stats,
    torch.cuda.max_memory_allocated).
    """

    reset: Callable[[], object]
    peak: Callable[[], int]


def host_gauge() -> MemoryGauge:
    """The resident memory of this process.

    Linux keeps the mark (VmHWM), which a process may reset. Where it may not (a sealed /proc), the
    resident memory at the end of a phase stands for its peak.
    """
    process = psutil.Process()
    clear = Path("/proc/self/clear_refs")
    status = Path("/proc/self/status")

    def reset() -> None:
        clear.write_text("5")

    def peak() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    try:
        reset()
        peak()
    except (OSError, StopIteration):
        return MemoryGauge(lambda: None, lambda: process.memory_info().rss)
    return MemoryGauge(reset, peak)


class PhaseTimer:
    """Sums seconds and keeps the highest memory of named phases until they are taken.

    with timer("rollout"): ...
    timer.take()  ->  {"time/rollout": 12.3, "memory/rollout_gib": 1.2, ...}
    A phase within a phase counts for both. An error raised in a phase carries its name; see
    phase_of.
    """

    def __init__(
        self,
        gauges: Mapping[str, MemoryGauge] | None = None,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        """gauges by the name their metrics get (default: {"memory": host_gauge()}); synchronize
        waits for the device, so that a phase is charged for the work that it launched."""
        self._gauges = {"memory": host_gauge()} if gauges is None else gauges
        self._synchronize = synchronize
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._peaks: dict[tuple[str, str], int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge_peaks()
        self._open.append(phase)
        logs.set_phase(phase)
        _logger.debug("begins")
        self._synchronize()
        start = time.perf_counter()
        try:
            with record_function(phase):  # a name in traces
                yield
                self._synchronize()
        except Exception as error:
            error.add_note(_NOTE + phase)
            raise
        finally:
            seconds = time.perf_counter() - start
            _logger.debug("took %.3f s", seconds)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            self._charge_peaks()
            self._open.pop()
            logs.set_phase(self._open[-1] if self._open else None)

    def seconds(self, phase: str) -> float:
        """Seconds of the phase since the last take; 0 if it did not run."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> dict[str, float]:
        """The metrics since the last take, which are then reset."""
        metrics = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics |= {
            f"{gauge}/{phase}_gib": peak / GIB for (gauge, phase), peak in self._peaks.items()
        }
        self._seconds = {}
        self._peaks = {}
        return metrics

    def _charge_peaks(self) -> None:
        """Charge the open phases with the memory reached since the last phase began or ended."""
        for name, gauge in self._gauges.items():
            peak = gauge.peak()
            for phase in self._open:
                self._peaks[name, phase] = max(peak, self._peaks.get((name, phase), 0))
            gauge.reset()


def phase_of(error: BaseException) -> str:
    """The innermost phase in which an error was raised, as words to append; empty without one."""
    return next(
        (f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), ""
    )
