"""Decides when the state of a run is saved, and when the run stops."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_FOLDER, CheckpointName, best_checkpoint
from vapo_megatron.checkpoint.manifest import readable_manifests
from vapo_megatron.checkpoint.recorded_rollouts import remove_unneeded
from vapo_megatron.checkpoint.resume import Resumed
from vapo_megatron.checkpoint.state_saver import SavedRun, Snapshot, StateSaver
from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.base import nearest
from vapo_megatron.config.run import CheckpointConfig, RetentionConfig
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.monitoring.names import EVALUATION
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.signals import first_signal, job_end_time, stop_requested

_logger = logging.getLogger(__name__)

# The largest share of the run's time spent on copies in host memory, the cores that write them
# counted: if steps are short, or the cores few, not each step has one.
_COPYING_SHARE = 0.05


@dataclass(frozen=True)
class _Decision:
    """The decisions of all ranks at a safe point. stop: why the run stops here; None where it goes
    on."""

    stop: str | None
    save: bool
    failed: bool
    alarmed: bool
    too_soon: bool
    replace: bool


class Checkpointer:
    """Saves checkpoints of state at safe points, and ends the run there when it is asked to or its
    time is short."""

    def __init__(
        self,
        config: CheckpointConfig,
        run: SavedRun,
        recorder: Recorder,
        resumed: Resumed | None,
        memory: Path | None = None,
    ) -> None:
        """Collective. recorder: times saves and shows failures. resumed: the checkpoint that this
        attempt resumes from; None for a new run. memory: where copies in host memory are kept; None
        for none."""
        self._config = config
        self._run_dir = run.run_dir
        self._recorder = recorder
        self._began_at = resumed.name if resumed is not None else None
        is_on_disk = resumed is not None and resumed.checkpoint.is_relative_to(run.run_dir)
        self._last = self._began_at if is_on_disk else None
        deadline = earliest_deadline(process_start(), config.job_timeout_s, job_end_time())
        self._limit = TimeLimit(deadline, margin_before(deadline, time.time()))
        if resumed is not None:
            self._limit.saved(resumed.manifest.seconds)
        self._limit.left_point()
        self._saved_at = time.monotonic()
        self._disk = StateSaver(run, run.run_dir, config.keep)
        self._memory = None
        self._copied_at = 0.0
        self._copy_seconds = 0.0
        self._memory_folder = memory
        if memory is not None:
            self._memory = StateSaver(run, memory, RetentionConfig(last=1), in_memory=True)

    def safe_point(
        self,
        snapshot: Snapshot,
        *,
        due: bool,
        last: bool,
        making_room: Callable[[], AbstractContextManager[None]] = nullcontext,
        replaces: bool = False,
    ) -> None:
        """Collective, where the state of the run is complete: save if one is due, stop if a stop
        was requested.

        Args:
            snapshot: of now.
            due: this is a point to save at.
            last: the run is complete and need not stop; pending saves are waited for.
            making_room: entered while tensors are gathered, which takes memory of the device.
            replaces: on rank 0, whether it holds more than the checkpoint of its name that may be
                on the disk.

        Raises:
            RunFailed: an alarm is set to stop the run, and holds.
            TryAgain: the run is saved and stops here: a signal requested it, or a time limit is
                near; or two saves failed. The checkpoints before it are untouched.
        """
        self._limit.reached_point()
        decision = self._agree(snapshot, due, replaces)
        if decision.alarmed:
            self.wait()  # for the state before the fault; the current state is not saved
            on_rank_zero(self._stop_for_alarm)
        is_due = (decision.save or decision.stop) and (
            decision.replace or snapshot.name != self._last
        )
        failed = (is_due or decision.failed) and self._finish() is not None
        if self._memory is not None and not (decision.too_soon or decision.stop or last):
            self._copy(snapshot, making_room)
        if is_due or failed:
            self._begin(snapshot, making_room)
        if failed or decision.stop or last:
            problem = self._finish()
            if problem is not None and not failed:
                self._begin(snapshot, making_room)
                problem = self._finish()
            if problem is not None:
                if self._memory is not None:  # kept for the next start (host_memory)
                    self._memory.finish()
                    self._memory.begin(snapshot, making_room)
                    self._memory.finish()
                checkpoint = self._run_dir / CHECKPOINT_FOLDER / str(snapshot.name)
                raise TryAgain(
                    f"{checkpoint}: cannot be saved ({problem}), tried twice: make room or mend "
                    "the disk, then start again with run.resume=auto; checkpoints saved before are "
                    "untouched",
                    shared=True,
                )
        if decision.stop or last:
            self.wait()
        if dist.get_rank() == 0 and not snapshot.record and not self._disk.is_busy:
            remove_unneeded(self._run_dir)
        if decision.stop and not last:
            raise TryAgain(
                f"{self._run_dir}: saved at {self._last} because of {decision.stop}: start the "
                "same command again, with run.resume=auto",
                shared=True,
            )
        self._limit.left_point()

    def wait(self) -> None:
        """Collective: finish the save in progress, if any."""
        self._finish()
        self._finish_copy()

    def _agree(self, snapshot: Snapshot, due: bool, replaces: bool) -> _Decision:
        """Collective: what any rank was asked to do, and what rank 0's clock and metrics say."""
        short = by_time = better = False
        if dist.get_rank() == 0:
            # An attempt without progress continues: stopped here, the next one would stop here
            # again.
            short = self._limit.is_short and snapshot.name != self._began_at
            minutes = (time.monotonic() - self._saved_at) / 60
            by_time = (
                self._config.every_minutes is not None and minutes >= self._config.every_minutes
            )
            better = self._is_best(snapshot)
        # What it began with is not on the disk
        from_copy = self._last is None and self._began_at is not None
        save = due or by_time or better or from_copy
        here = (
            short,
            save,
            self._disk.has_failed,
            self._recorder.stopping is not None,
            self._is_too_soon(),
            replaces,
        )
        signals, flags = zip(*gather_values((stop_requested(), here)), strict=True)
        is_short, *others = map(any, zip(*flags, strict=True))
        return _Decision(first_signal(signals) or ("its time limit" if is_short else None), *others)

    def _is_too_soon(self) -> bool:
        """Whether the last copy in host memory is still being written on this rank, or copying
        takes up the run, or its folder is gone."""
        if self._memory is None:
            return False
        if self._memory_folder is None or not self._memory_folder.is_dir():
            if self._memory_folder is not None:
                self._recorder.console.alarm(
                    f"no more copies in host memory ({self._memory_folder} was removed): a lost "
                    "rank costs what follows the last checkpoint"
                )
                self._memory_folder = None
            return True
        spent = self._copy_seconds + self._memory.writing_seconds
        rests = time.monotonic() - self._copied_at < spent / _COPYING_SHARE
        return self._memory.is_busy or (dist.get_rank() == 0 and rests)

    def _stop_for_alarm(self) -> None:
        raise RunFailed(
            f"{self._run_dir}: stopped by the alarm {self._recorder.stopping}: docs/alarms.md says "
            "what to do; run.resume=auto resumes from the last checkpoint"
        )

    def _is_best(self, snapshot: Snapshot) -> bool:
        keep = self._config.keep
        if keep.best is None or keep.best not in snapshot.metrics:
            if (
                keep.best is not None
                and not keep.best.startswith(EVALUATION)
                and snapshot.progress.step == 1
            ):
                guess = nearest(keep.best, snapshot.metrics) or "one of metrics.jsonl"
                _logger.warning(
                    "checkpoint.keep.best=%s is not a metric of a step: did you mean %s?",
                    keep.best,
                    guess,
                )
            return False
        try:
            manifests = readable_manifests(self._run_dir)
        except OSError as error:
            _logger.warning(
                "%s: checkpoints cannot be read (%s): step %d is not compared with them",
                self._run_dir,
                error.strerror,
                snapshot.progress.step,
            )
            return False
        metrics: dict[CheckpointName, Mapping[str, float]] = {
            name: manifest.metrics for name, manifest in manifests.items()
        }
        return best_checkpoint(metrics | {snapshot.name: snapshot.metrics}, keep) == snapshot.name

    def _begin(
        self, snapshot: Snapshot, making_room: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._saved_at = time.monotonic()
        with self._recorder.timer("save_checkpoint"):
            self._disk.begin(snapshot, making_room)
        self._last = snapshot.name

    def _copy(
        self, snapshot: Snapshot, making_room: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Collective: have a copy in host memory as well."""
        self._finish_copy()
        if self._memory is None:
            return
        start = time.monotonic()
        with self._recorder.timer("copy_state"):
            self._memory.begin(snapshot, making_room)
        self._copied_at = time.monotonic()
        self._copy_seconds = self._copied_at - start

    def _finish_copy(self) -> None:
        """Collective: wait for the copy in progress; where it failed there are no more."""
        if self._memory is None:
            return
        outcome = self._memory.finish()
        if outcome is not None and outcome.problem is not None:
            self._recorder.console.alarm(
                f"no more copies in host memory ({outcome.problem}): a lost rank costs what "
                "follows the last checkpoint"
            )
            self._memory = None

    def _finish(self) -> str | None:
        """Collective: wait for the save that is under way, if there is one; why it failed, if it
        did."""
        with self._recorder.timer("wait_for_save"):
            outcome = self._disk.finish()
        if outcome is None:
            return None
        if outcome.problem is None:
            self._limit.saved(outcome.seconds)
        else:
            self._last = None
            self._recorder.console.alarm(f"saving failed ({outcome.problem})")
        return outcome.problem


class TimeLimit:
    """Watches a deadline; times are seconds of the given clock."""

    def __init__(
        self, deadline: float | None, margin: float, clock: Callable[[], float] = time.time
    ) -> None:
        """deadline None: there is none. margin: left besides the longest stretch and the longest
        save."""
        self._deadline = deadline
        self._margin = margin
        self._clock = clock
        # Over the whole attempt: an evaluation or an export happens once in many steps, and will
        # happen again.
        self._longest_stretch = self._longest_save = 0.0
        self._last: float | None = None

    def reached_point(self) -> None:
        """The run is where it could end; the time since the last such point counts as a stretch."""
        now = self._clock()
        if self._last is not None:
            self._longest_stretch = max(self._longest_stretch, now - self._last)
        self._last = now

    def left_point(self) -> None:
        """The run continues; time spent at the point (a save) does not count as work."""
        self._last = self._clock()

    def saved(self, seconds: float) -> None:
        """A save took this long, from its begin until it was committed."""
        self._longest_save = max(self._longest_save, seconds)

    @property
    def is_short(self) -> bool:
        """Whether another stretch of work might not finish and be saved before the deadline."""
        if self._deadline is None:
            return False
        needed = self._longest_stretch + self._longest_save + self._margin
        return self._clock() + needed > self._deadline


def margin_before(deadline: float | None, now: float) -> float:
    """Seconds to leave before a deadline: 3 minutes, or 5 % of the time until then where that is
    less."""
    if deadline is None:
        return 0.0
    return min(180.0, 0.05 * max(0.0, deadline - now))


def earliest_deadline(started: float, limit_s: float | None, job_end: float | None) -> float | None:
    """The earlier of the config's limit, counted from `started`, and the job's end (Unix times);
    None for neither."""
    ends = (job_end, None if limit_s is None else started + limit_s)
    return min((end for end in ends if end is not None), default=None)


def process_start() -> float:
    """When this process started (Unix time); loading models and starting engines takes minutes of a
    time limit."""
    return float(psutil.Process().create_time())
