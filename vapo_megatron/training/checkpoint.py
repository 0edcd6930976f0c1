"""When the state of a run is saved, what goes into it, and when the run stops for it."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    CheckpointName,
    best_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from vapo_megatron.checkpoint.manifest import FileFacts, Manifest, read_manifest, write_json
from vapo_megatron.checkpoint.progress import GROUPS_FILE, PROGRESS_FILE, Progress
from vapo_megatron.checkpoint.time_limit import TimeLimit, earliest_deadline, process_start
from vapo_megatron.config.atomic import atomic_write, sync
from vapo_megatron.config.base import Section
from vapo_megatron.config.checkpoint import CheckpointConfig
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.suggest import nearest
from vapo_megatron.errors import BadInput, RunFailed, TryAgain, VapoError
from vapo_megatron.mcore.dist_saver import plan_save
from vapo_megatron.mcore.mesh import world_timeout
from vapo_megatron.mcore.rng import rng_state
from vapo_megatron.monitoring.names import EVALUATION
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.signals import job_end_time, stop_requested
from vapo_megatron.training.background_save import BackgroundSave, CheckpointJob, Problem
from vapo_megatron.training.broadcast import on_rank_zero
from vapo_megatron.training.recorded_rollouts import remove_unneeded
from vapo_megatron.training.resume import RUN_FILES, Resumed, SavedModel, layouts
from vapo_megatron.weights.torch_dist import write_model_card

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds besides models, generators and files.

    Attributes:
        progress: how far the run is.
        metrics: of the step that was done last, by name; rank 0's count.
        record: the files of what value pretraining has recorded, where that is not over.
        groups: of graded groups that wait for the trainer (rollout/saved_groups.py); empty where there are none.
    """

    progress: Progress
    metrics: Mapping[str, float]
    record: Mapping[str, FileFacts] = field(default_factory=dict)
    groups: bytes = b""

    @property
    def name(self) -> CheckpointName:
        """Of the checkpoint."""
        pretraining = self.progress.pretraining
        return (
            CheckpointName(self.progress.step, pretraining.count) if self.record else CheckpointName(self.progress.step)
        )


@dataclass(frozen=True)
class _Decision:
    """What all ranks do at a safe point."""

    stop: bool
    save: bool
    failed: bool
    alarmed: bool


class Checkpointer:
    """Saves checkpoints of state at safe points, and ends the run there when it is asked to or its time is short."""

    def __init__(
        self,
        config: CheckpointConfig,
        settings: Section,
        kind: Literal["train", "sft"],
        run_dir: Path,
        models: Mapping[str, SavedModel],
        recorder: Recorder,
        resumed: Resumed | None,
    ) -> None:
        """Collective.

        Args:
            config: the checkpoint section.
            settings: the whole config, which is saved along.
            kind: the command.
            run_dir: of the run.
            models: by the name of their folder.
            recorder: times saves and tells of them.
            resumed: the checkpoint that this attempt of the run goes on from; None for a new run.
        """
        self._config, self._settings, self._kind, self._run_dir = config, settings, kind, run_dir
        self._models, self._recorder = models, recorder
        self._run_id = resumed.manifest.run_id if resumed is not None else secrets.token_hex(8)
        self._began_at = self._last = resumed.name if resumed is not None else None
        deadline = earliest_deadline(process_start(), config.job_timeout_s, job_end_time())
        self._limit = TimeLimit(deadline, config.margin_s)
        if resumed is not None:
            self._limit.saved(resumed.manifest.seconds)
        self._limit.left_point()
        self._saved_at = time.monotonic()
        self._running: BackgroundSave | None = None
        self._unopened: Problem | None = None
        # Threads of saves meet in here, undisturbed by what training sends.
        self._group = dist.new_group(timeout=world_timeout(), backend="gloo")

    def safe_point(
        self,
        snapshot: Snapshot,
        *,
        due: bool,
        last: bool,
        making_room: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Collective, where the state of the run is whole: save if it is time to, stop if that is asked for.

        Args:
            snapshot: of now.
            due: this is a point to save at.
            last: the run is done and need not stop any more; what is being saved is waited for.
            making_room: entered while tensors are gathered, which takes memory of the device.

        Raises:
            RunFailed: an alarm is set to stop the run, and holds.
            TryAgain: the run is saved and stops here: a signal asked for it, or a time limit is near.
            BadInput, TryAgain: a save failed, and so did a second one; by whether trying again could help. The
            checkpoints before it are untouched.
        """
        self._limit.reached_point()
        decision = self._agree(snapshot, due)
        if decision.alarmed:
            self._finish()  # of the state before the trouble; that of now is not saved
            on_rank_zero(self._stop_for_alarm)
        wanted = (decision.save or decision.stop) and snapshot.name != self._last
        failed = (wanted or decision.failed) and self._finish() is not None
        if wanted or failed:
            self._begin(snapshot, making_room)
        if failed or decision.stop or last or not self._config.asynchronous:
            problem = self._finish()
            if problem is not None and not failed:
                self._begin(snapshot, making_room)
                problem = self._finish()
            if problem is not None:
                raise self._refused(snapshot.name, problem)
        if dist.get_rank() == 0 and not snapshot.record and not (self._running is not None and self._running.is_busy):
            remove_unneeded(self._run_dir)
        if decision.stop and not last:
            raise TryAgain(
                f"{self._run_dir}: saved at {self._last} because of {stop_requested() or 'its time limit'}: start the "
                "same command again, with run.resume=auto",
                shared=True,
            )
        self._limit.left_point()

    def wait(self) -> None:
        """Collective: end the save that is under way, if there is one."""
        self._finish()

    def _agree(self, snapshot: Snapshot, due: bool) -> _Decision:
        """Collective: what any rank was told, and what rank 0's clock and metrics say."""
        short = by_time = better = False
        if dist.get_rank() == 0:
            # A attempt that has got nowhere yet goes on: stopped here, the next one would stop here again.
            short = self._limit.is_short and snapshot.name != self._began_at
            minutes = (time.monotonic() - self._saved_at) / 60
            by_time = self._config.every_minutes is not None and minutes >= self._config.every_minutes
            better = self._is_best(snapshot)
        running = self._running
        said = [
            stop_requested() is not None or short,
            due or by_time or better,
            self._unopened is not None or (running is not None and running.has_failed),
            self._recorder.stopping is not None,
        ]
        flags = torch.tensor(said, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return _Decision(*flags.bool().tolist())

    def _stop_for_alarm(self) -> None:
        raise RunFailed(
            f"{self._run_dir}: stopped by the alarm {self._recorder.stopping}: docs/alarms.md says what to do; "
            "run.resume=auto goes on from the last checkpoint"
        )

    def _is_best(self, snapshot: Snapshot) -> bool:
        keep = self._config.keep
        if keep.best is None or keep.best not in snapshot.metrics:
            if keep.best is not None and not keep.best.startswith(EVALUATION) and snapshot.progress.step == 1:
                self._warn_of_unknown(keep.best, snapshot.metrics)
            return False
        metrics: dict[CheckpointName, Mapping[str, float]] = {}
        for name, path in list_checkpoints(self._run_dir).items():
            try:
                metrics[name] = read_manifest(path).metrics
            except BadInput:
                continue
        metrics[snapshot.name] = snapshot.metrics
        return best_checkpoint(metrics, keep) == snapshot.name

    def _warn_of_unknown(self, name: str, metrics: Mapping[str, float]) -> None:
        guess = nearest(name, metrics)
        _logger.warning(
            "checkpoint.keep.best=%s is no metric of a step, and no checkpoint is kept for it%s",
            name,
            f": did you mean {guess}?" if guess else "; metrics.jsonl has the names",
        )

    def _begin(self, snapshot: Snapshot, making_room: Callable[[], AbstractContextManager[None]]) -> None:
        name, rank = snapshot.name, dist.get_rank()
        self._saved_at = time.monotonic()
        opened = on_rank_zero(partial(self._open, name))
        if isinstance(opened, Problem):
            self._unopened = opened
            return
        folder: Path = opened
        with making_room(), self._recorder.timer("save_checkpoint"):
            plans = {}
            for key, saved in self._models.items():
                onloaded = saved.model.onloaded
                plans[key] = plan_save(saved.model, folder / key)
                saved.model.onload_only(*onloaded)
            writers: list[Callable[[Path], None]] = [partial(_write_generators, rank, rng_state())]
            if rank == 0:
                writers += self._rank_zero_writers(snapshot)
        manifest = Manifest(
            checkpoint_id=secrets.token_hex(8),
            run_id=self._run_id,
            step=snapshot.progress.step,
            kind=self._kind,
            models=tuple(self._models),
            world_size=dist.get_world_size(),
            layouts=layouts(self._models),
            metrics={key: value for key, value in snapshot.metrics.items() if key.startswith(EVALUATION)},
            files={},
            record=dict(snapshot.record),
        )
        job = CheckpointJob(self._run_dir, name, folder, plans, writers, manifest, self._config.keep)
        self._running = BackgroundSave(job, self._group)
        self._last = name

    def _open(self, name: CheckpointName) -> Path | Problem:
        try:
            folder = open_checkpoint(self._run_dir, name)
            for part in ("ranks", *self._models):
                (folder / part).mkdir()
            return folder
        except OSError as error:
            return Problem.of(error)

    def _rank_zero_writers(self, snapshot: Snapshot) -> list[Callable[[Path], None]]:
        copies = {name: path.read_bytes() for name in RUN_FILES if (path := self._run_dir / name).is_file()}

        def write_small(folder: Path) -> None:
            dump_config(self._settings, folder / "config.yaml")
            write_json(folder / PROGRESS_FILE, snapshot.progress.model_dump(mode="json"))
            if snapshot.groups:
                with atomic_write(folder / GROUPS_FILE, "wb") as file:
                    file.write(snapshot.groups)
            for name, content in copies.items():
                (folder / name).write_bytes(content)
                sync(folder / name)

        def write_cards(folder: Path) -> None:
            for key, saved in self._models.items():
                model = saved.model
                dtype = str(model.dtype).removeprefix("torch.")
                write_model_card(folder / key, model.spec, model.head, saved.source_dir, dtype)

        return [write_small, write_cards]

    def _finish(self) -> Problem | None:
        """Collective: wait for the save that is under way, if there is one; why it failed, if it did."""
        running, self._running = self._running, None
        problem, self._unopened = self._unopened, None
        if running is not None:
            outcome = running.wait()
            problem = outcome.problem
            if problem is None:
                self._limit.saved(outcome.seconds)
        if problem is not None:
            self._last = None
            self._recorder.console.alarm(f"saving failed ({problem.reason})")
        return problem

    def _refused(self, name: CheckpointName, problem: Problem) -> VapoError:
        checkpoint = self._run_dir / CHECKPOINT_FOLDER / str(name)
        kind: type[VapoError] = BadInput if problem.lasting else TryAgain
        first = "make room or mend it, then " if problem.lasting else ""
        return kind(
            f"{checkpoint}: cannot be saved ({problem.reason}), tried twice: {first}start again with run.resume=auto; "
            "checkpoints saved before are untouched",
            shared=True,
        )


def _write_generators(rank: int, state: dict[str, Any], folder: Path) -> None:
    path = folder / "ranks" / f"{rank:05d}.pt"
    torch.save(state, path)
    sync(path)
