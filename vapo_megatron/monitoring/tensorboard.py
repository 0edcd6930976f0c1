"""TensorBoard: a run's scalars and alarms under run_dir/tensorboard."""

from collections.abc import Iterable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from vapo_megatron.monitoring.trackers import Record, Row


class TensorBoard:
    """Scalars against the step, or against the counter of their group; alarms as text."""

    def __init__(self, run_dir: Path, start_step: int = 0, kept: Iterable[Row] = ()) -> None:
        """start_step: what was drawn at it or beyond, by an earlier attempt, is forgotten; 0 for a new run.
        kept: the rows of metrics.jsonl before it.
        """
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step or None)
        for row in kept:
            record = Record(row["step"], {name: value for name, value in row.items() if value is not None})
            for name in record.metrics.keys() - {"step"}:
                counter, place = record.place(name)
                # Forgotten with the steps, though another counter than theirs put it there.
                if counter != "step" and place >= start_step:
                    self._writer.add_scalar(name, record.metrics[name], place)

    def write(self, record: Record) -> None:
        """Take in a step."""
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.place(name)[1])
        for line in record.alarms:
            self._writer.add_text("alarms", line, record.step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """End the file."""
        self._writer.close()
