"""Everything that a run shows and keeps, behind one object: console, metrics, samples, alarms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from vapo_megatron.config.monitoring import MonitoringConfig
from vapo_megatron.experience.sample import Sample
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import Alarms
from vapo_megatron.monitoring.console import Advance, RunConsole
from vapo_megatron.monitoring.facts import write_environment
from vapo_megatron.monitoring.metrics import MetricsWriter, read_metrics
from vapo_megatron.monitoring.samples import SampleWriter
from vapo_megatron.monitoring.timers import MemoryGauge, PhaseTimer, host_gauge


class Recorder:
    """What rank 0 prints and writes. On other ranks it only keeps time, so that the loop need not ask for the rank."""

    def __init__(
        self,
        run_dir: Path,
        config: MonitoringConfig,
        is_main_rank: bool,
        start_step: int = 0,
        device_gauges: Mapping[str, tuple[Callable[[], object], Callable[[], int]]] | None = None,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        """start_step: rows of metrics from this step on are removed first (a resumed run); 0 starts afresh.
        device_gauges: high-water marks beside the host's, as (reset, peak) by name; synchronize waits for the device.
        """
        self.run_dir, self.is_main_rank = run_dir, is_main_rank
        self.console = RunConsole(enabled=is_main_rank)
        gauges = {name: MemoryGauge(*calls) for name, calls in (device_gauges or {}).items()}
        self.timer = PhaseTimer({"memory": host_gauge()} | gauges, synchronize)
        self._row: dict[str, float] = {}
        self._metrics = MetricsWriter(run_dir, config.tensorboard, start_step) if is_main_rank else None
        self._samples = SampleWriter(run_dir, config.sample_groups_per_step) if is_main_rank else None
        self._alarms = Alarms(config.alarms, read_metrics(run_dir) if start_step and is_main_rank else ())
        if is_main_rank:
            write_environment(run_dir)

    @contextmanager
    def phase(self, name: str, total: int | None = None, title: str | None = None) -> Iterator[Advance]:
        """A timed phase with progress; its seconds go into the step's row as time/<name>."""
        with self.timer(name), self.console.phase(title or name.replace("_", " "), total) as advance:
            yield advance

    def add(self, metrics: Mapping[str, float]) -> None:
        """Put metrics into the row that the next write ends."""
        self._row.update(metrics)

    def discard_pending(self) -> None:
        """Forget the metrics and times that no write has ended."""
        self._row = {}
        self.timer.take()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some of a step's responses for people to read."""
        if self._samples is not None:
            self._samples.write(step, samples)

    def write(self, step: int) -> dict[str, float]:
        """End the row of a step: it goes into the files, and trouble that it gives away onto the console."""
        row, self._row = self._row | self.timer.take(), {}
        if self._metrics is not None:
            self._metrics.write(step, row)
            for line in self._alarms.check(row):
                self.console.alarm(line)
        return row

    def write_pretraining(self, updates: int, samples: int) -> None:
        """End a row of value pretraining: the critic's metrics so far, under names of their own and by updates."""
        row = {
            f"{names.PRETRAINING}{name.partition('/')[2]}": value
            for name, value in self._row.items()
            if name.startswith("critic/")
        }
        self._row = {}
        row |= {names.own_counter(names.PRETRAINING): float(updates), f"{names.PRETRAINING}samples": float(samples)}
        row |= {f"{names.PRETRAINING}{name}": value for name, value in self.timer.take().items()}
        if self._metrics is not None:
            self._metrics.write(0, row)

    def step_line(self, step: int, steps: int, row: Mapping[str, float]) -> None:
        """The console's line of a step."""
        self.console.step(step, steps, row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()
