"""One object for everything that a run prints and records: console, metrics, samples, alarms,
trackers."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import Tensor

from vapo_megatron import logs
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.files import CannotWrite, atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import Alarms
from vapo_megatron.monitoring.console import Advance, RunConsole
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.metrics import MetricsWriter
from vapo_megatron.monitoring.samples import Decode, SampleWriter
from vapo_megatron.monitoring.timers import PhaseTimer
from vapo_megatron.monitoring.trackers import Record, Row, Trackers, start_trackers

TOKEN_ESTIMATES = (
    4  # of a step's kept responses, whose values and advantages are kept token by token
)

_SAMPLE_GROUPS = 8  # of a step, whose responses are kept under samples/


class Recorder:
    """Prints and records on rank 0. On other ranks it only keeps time, so that the loop need not
    ask for the rank."""

    def __init__(
        self,
        run_dir: Path,
        config: MonitoringConfig,
        is_main_rank: bool,
        start_step: int = 0,
        timer: PhaseTimer | None = None,
        decode: Decode | None = None,
        gpus: int = 0,
    ) -> None:
        """start_step: metrics from this step on are removed first (a resumed run); 0 starts afresh.
        timer: one that is already running; None for a new one.
        decode: token ids to text, for estimates; None: no estimates are kept.
        gpus: that the run holds.
        """
        self._gpus = gpus
        self._counted = time.monotonic()
        self.run_dir = run_dir
        self.is_main_rank = is_main_rank
        self.console = RunConsole(enabled=is_main_rank)
        self.timer = timer or PhaseTimer()
        self._row: dict[str, float] = {}
        self._left_out = 0
        self._metrics = MetricsWriter(run_dir, start_step) if is_main_rank else None
        if self._metrics is not None:
            kept = self._metrics.kept
        else:
            kept = []
        self._samples = SampleWriter(run_dir, _SAMPLE_GROUPS, TOKEN_ESTIMATES, decode)
        self._alarms = Alarms(config.alarms, kept)
        self._trackers = Trackers(self.console.note)
        if is_main_rank:
            with atomic_write(run_dir / "environment.json") as file:
                json.dump(environment_facts(), file, indent=2)
            self._trackers = start_trackers(config, run_dir, start_step, self.console.note)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """A timed phase with progress; its seconds go into the step's row as time/<name>."""
        with self.timer(name), self.console.phase(name.replace("_", " "), total) as advance:

            def advance_and_tell(amount: int) -> None:
                logs.note_progress()  # for the watchdog
                advance(amount)

            yield advance_and_tell

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row that the next write ends."""
        self._row.update(metrics)

    @contextmanager
    def optional(self, output: str) -> Iterator[None]:
        """The run continues without what the disk refuses in here: one line names it,
        tracking/failures counts it."""
        try:
            yield
        except CannotWrite as error:
            self._left_out += 1
            self.console.alarm(f"{output} is not kept: {error}")

    def discard_pending(self) -> None:
        """Drop the metrics and times that are not written yet."""
        self._row = {}
        self.timer.take()

    def samples(self, step: int, samples: Sequence[Sample], dropped: Sequence[Sample] = ()) -> None:
        """Keep some of a step's responses for people to read. dropped: as for
        SampleWriter.write."""
        if self.is_main_rank:
            self._samples.write(step, samples, dropped)

    def estimated(self, group_ids: Tensor) -> int:
        """The number of a step's first samples that estimates() needs. group_ids: int64 [S], in
        order."""
        return self._samples.with_tokens_among(group_ids)

    def estimates(
        self, step: int, values: Tensor | None, advantages: Tensor | None, cu_seqlens: Tensor
    ) -> None:
        """Keep values and advantages [T] of the tokens of some of the step's samples
        (SampleWriter)."""
        if self.is_main_rank:
            self._samples.add_estimates(step, values, advantages, cu_seqlens)

    def write(self, step: int) -> dict[str, float]:
        """End the row of a step: write it, and print the alarms that it raises."""
        row = self._row | self.timer.take()
        self._row = {}
        self._keep(step, row, self._samples.take())
        return row

    def add_cost(self) -> None:
        """Add the hours since the last call, or since the start, and GPU-hours where there are
        GPUs."""
        now = time.monotonic()
        hours = (now - self._counted) / 3600
        self._counted = now
        self.add({names.HOURS: hours})
        if self._gpus:
            self.add({names.GPU_HOURS: hours * self._gpus})

    @property
    def stopping(self) -> str | None:
        """Name and text of the alarm that ends the run; None without one, and on other ranks."""
        return self._alarms.stopping

    def write_pretraining(self, updates: int, samples: int) -> None:
        """End a row of value pretraining: the critic's metrics under separate names, by updates.
        Skipped updates and failed grades keep their names, for the alarms."""
        row = {
            f"{names.PRETRAINING}{name.partition('/')[2]}": value
            for name, value in self._row.items()
            if name.startswith("critic/")
        }
        trouble = (names.SKIPPED, names.FAILED_GRADES)
        row |= {
            name: value for name, value in self._row.items() if name.startswith(trouble) and value
        }
        self._row = {}
        row |= {
            names.own_counter(names.PRETRAINING): float(updates),
            f"{names.PRETRAINING}samples": float(samples),
        }
        row |= {f"{names.PRETRAINING}{name}": value for name, value in self.timer.take().items()}
        self._keep(0, row, ())

    def _keep(self, step: int, row: dict[str, float], samples: Sequence[Row]) -> None:
        """Write a row to the files and trackers, and print the alarms that it raises."""
        if self._metrics is None:
            return
        if (
            failures := self._trackers.failures
            + self._samples.failures
            + self._metrics.refused
            + self._left_out
        ):
            row[names.TRACKER_FAILURES] = float(failures)
        lines = [f"{name}: {text}" for name, text in self._alarms.check(row).items()]
        row |= self._alarms.metrics()
        finite = self._metrics.write(step, row | {names.WRITTEN_AT: time.time()})
        del finite[names.WRITTEN_AT]
        self._trackers.write(Record(step, finite, samples, lines))
        for line in lines:
            self.console.alarm(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._trackers.close(failed=kind is not None and issubclass(kind, Exception))
        if self._metrics is not None and kind is None:
            self._metrics.close()
