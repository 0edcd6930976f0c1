"""Where a run's metrics, samples and alarms go besides its own files: TensorBoard, Weights & Biases."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vapo_megatron.config.monitoring import MonitoringConfig
from vapo_megatron.errors import reason_of
from vapo_megatron.monitoring import names

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What a step leaves.

    step counts from 1; rows with step 0 come before the first one. metrics are finite. samples are rows of the samples
    file (monitoring/samples.py); alarms are lines.
    """

    step: int
    metrics: Mapping[str, float]
    samples: Sequence[Row] = ()
    alarms: Sequence[str] = ()

    def place(self, name: str) -> tuple[str, int]:
        """What a metric is drawn against: the name of its counter and that counter's value."""
        counter = names.own_counter(name)
        return (counter, int(self.metrics[counter])) if counter in self.metrics else ("step", self.step)


class Tracker(Protocol):
    """One place that keeps what a run shows. Whatever it raises is counted and never stops the run."""

    def write(self, record: Record) -> None:
        """Take in a step."""

    def close(self, failed: bool) -> None:
        """End; failed: the run ended by an error."""


@dataclass
class Trackers:
    """The trackers of a run. One that fails says so once; `failures` counts how often any of them has failed."""

    note: Callable[[str], None]
    failures: int = 0
    _open: dict[str, Tracker] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def start(self, name: str, make: Callable[[], Tracker]) -> None:
        """Add the tracker that make() gives; the run goes on without it where that fails."""
        try:
            self._open[name] = make()
        except Exception as error:
            self._failed(name, error, "the run goes on without it")

    def write(self, record: Record) -> None:
        """Hand a step to all of them."""
        for name, tracker in self._open.items():
            try:
                tracker.write(record)
            except Exception as error:
                self._failed(name, error, "what it lacks is in metrics.jsonl")

    def close(self, failed: bool) -> None:
        """End all of them; a second call does nothing."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close(failed)
            except Exception as error:
                self._failed(name, error, "what it lacks is in metrics.jsonl")

    def _failed(self, name: str, error: Exception, consequence: str) -> None:
        self.failures += 1
        if name not in self._named:
            self._named.add(name)
            self.note(f"{name}: {reason_of(error)} ({consequence})")


def start_trackers(
    config: MonitoringConfig, run_dir: Path, start_step: int, kept: Iterable[Row], note: Callable[[str], None]
) -> Trackers:
    """The trackers that config asks for.

    Args:
        run_dir: with config.yaml, where the run has one.
        start_step: the first step of this attempt, 0 of a new run.
        kept: the rows of metrics.jsonl before it.
        note: says a line to people.
    """
    trackers = Trackers(note)
    if config.tensorboard:
        from vapo_megatron.monitoring.tensorboard import TensorBoard  # takes a second, and only rank 0 has use for it

        trackers.start("TensorBoard", lambda: TensorBoard(run_dir, start_step, kept))
    if config.wandb.enabled:
        from vapo_megatron.monitoring.weights_and_biases import WeightsAndBiases

        trackers.start("Weights & Biases", lambda: WeightsAndBiases(config.wandb, run_dir))
    return trackers
