"""Writes the state of a run as a checkpoint, to the run directory or host memory, while training
continues.

The state is copied first. Then a thread of every rank writes its part; ranks meet in a process
group that only these threads use, so that a checkpoint is committed as soon as all have written,
whatever training does meanwhile.
"""

import errno
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    CheckpointName,
    commit_checkpoint,
    list_checkpoints,
    open_checkpoint,
    remove_checkpoint,
    to_remove,
)
from vapo_megatron.checkpoint.dist_saver import ModelSaver, PlannedSave
from vapo_megatron.checkpoint.manifest import (
    MANIFEST_FILE,
    PROGRESS_FILE,
    FileFacts,
    Manifest,
    Progress,
    file_facts,
    readable_manifests,
)
from vapo_megatron.checkpoint.nodes import Nodes, send_to_keepers
from vapo_megatron.checkpoint.resume import RUN_FILES, Resumed, SavedModel, layouts
from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.run import RetentionConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.files import atomic_write, sync
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.megatron.training_state import rng_state
from vapo_megatron.monitoring.names import EVALUATION
from vapo_megatron.weights.adapters import base_identity
from vapo_megatron.weights.hf_writer import write_json
from vapo_megatron.weights.torch_dist import write_model_card

# Bytes of host memory that are left to others.
_ROOM_BYTES = 64 << 20
# Errors of writing; torch's own writer turns OSError into RuntimeError.
_WRITE_ERRORS = (OSError, BadInput, RuntimeError)


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint besides models, random generators and run files.

    Attributes:
        progress: how far the run is.
        metrics: rank 0's metrics of the last step.
        record: the files that value pretraining has recorded, until it is over.
        contents: more files by name, such as graded groups that wait for the trainer, or what
            makes a file's bytes where it is written, from values that stay as they are; empty ones
            are not written.
    """

    progress: Progress
    metrics: Mapping[str, float]
    record: Mapping[str, FileFacts] = field(default_factory=dict)
    contents: Mapping[str, bytes | Callable[[], bytes]] = field(default_factory=dict)

    @property
    def name(self) -> CheckpointName:
        """The name of the checkpoint."""
        pretraining = self.progress.pretraining
        if self.record:
            return CheckpointName(self.progress.step, pretraining.count)
        return CheckpointName(self.progress.step)


@dataclass(frozen=True)
class SavedRun:
    """The facts of a run that stay the same from save to save. run_id: the same in all attempts."""

    settings: TrainConfig | SftConfig
    kind: Literal["train", "sft", "pretrain-critic"]
    run_dir: Path
    models: Mapping[str, SavedModel]
    run_id: str


def run_id_of(resumed: Resumed | None) -> str:
    """The id of the run that is resumed, or a new one."""
    if resumed is not None:
        return resumed.manifest.run_id
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank. problem: why it failed; None if it did not."""

    seconds: float
    problem: str | None = None


@dataclass(frozen=True)
class _Save:
    """One rank's part of a checkpoint, all of it copies that training does not touch: its part of
    each model, and its other files, written by `writers`, which get the hidden folder. Rank 0
    enters the files into the manifest."""

    name: CheckpointName
    folder: Path
    models: Mapping[str, PlannedSave]
    writers: Sequence[Callable[[Path], None]]
    manifest: Manifest
    began: float = field(default_factory=time.monotonic)


@dataclass
class _Part:
    """A rank's report to rank 0 after it has written its part."""

    results: dict[str, list[Any]] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    problem: str | None = None


class StateSaver:
    """Saves of a run in one place, one after the other. All methods are collective, its making
    included. place: has the folder of checkpoints, of which `keep` stay; in_memory: it is host
    memory, of which some is left free."""

    def __init__(
        self, run: SavedRun, place: Path, keep: RetentionConfig, in_memory: bool = False
    ) -> None:
        self._run = run
        self._place = place
        self._keep = keep
        self._in_memory = in_memory
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._broken: Exception | None = None
        self._thread_seconds = 0.0  # of the processor, of the last save's thread
        self._nodes = Nodes.of(place)  # ranks share a disk, and within a node its host memory
        self._models = {key: ModelSaver(saved.model) for key, saved in run.models.items()}
        # Threads of saves meet in here, undisturbed by what training sends.
        self._group = dist.new_group(timeout=world_timeout(), backend="gloo")

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing_seconds(self) -> float:
        """What writing its part of the last save took from this rank, in seconds of all the cores
        that its share of the machine has."""
        cores = len(os.sched_getaffinity(0)) / len(self._nodes.own)
        return self._thread_seconds / max(1.0, cores)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the last save failed."""
        return self._broken is not None or (
            self._outcome is not None and self._outcome.problem is not None
        )

    def begin(
        self, snapshot: Snapshot, making_room: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Copy the snapshot and begin to write it; finish() has ended the previous save.
        making_room: entered while tensors are gathered, which takes memory of the device."""
        run = self._run
        rank = dist.get_rank()
        opened, problem = on_rank_zero(partial(self._open, snapshot.name))
        if problem is not None:
            self._outcome = Outcome(0.0, problem)
            return
        folder = self._place / CHECKPOINT_FOLDER / opened
        if self._nodes.count > 1:
            with suppress(OSError):  # writing will say so
                self._make_parts(folder)
        with making_room():
            plans = {}
            for key, saved in run.models.items():
                onloaded = saved.model.offloader.onloaded
                plans[key] = self._models[key].plan(folder / key)
                saved.model.offloader.onload_only(*onloaded)
            writers: list[Callable[[Path], None]] = [partial(_write_generators, rank, rng_state())]
            if rank == 0:
                writers.append(self._rank_zero_writer(snapshot))
        if self._in_memory:
            copies = 1 if self._nodes.count == 1 else 2
            needed = sum(plan.bytes for plan in plans.values()) * len(self._nodes.own) * copies
            writers.insert(0, partial(_check_room, needed))
        manifest = Manifest(
            checkpoint_id=secrets.token_hex(8),
            run_id=run.run_id,
            step=snapshot.progress.step,
            kind=run.kind,
            models=tuple(run.models),
            world_size=dist.get_world_size(),
            layouts=layouts(run.models),
            metrics={
                name: value
                for name, value in snapshot.metrics.items()
                if (name.startswith(EVALUATION) or name == run.settings.checkpoint.keep.best)
                and math.isfinite(value)
            },
            files={},
            record=dict(snapshot.record),
        )
        save = _Save(snapshot.name, folder, plans, writers, manifest)
        self._thread = threading.Thread(
            target=self._run_save, args=(save,), name="save-checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> Outcome | None:
        """Wait for the save that is under way; how the last one ended, None where there was none
        since the last call. Raises what broke the exchange with the other ranks, where one of them
        is gone."""
        if self._thread is not None:
            self._thread.join()
        broken = self._broken
        outcome = self._outcome
        self._thread = self._broken = self._outcome = None
        if broken is not None:
            raise broken
        return outcome

    def _open(self, name: CheckpointName) -> tuple[str, str | None]:
        """The name of the folder that a checkpoint is written into, or why it cannot be made."""
        try:
            folder = open_checkpoint(self._place, name)
            self._make_parts(folder)
            return folder.name, None
        except OSError as error:
            return "", _reason(error)

    def _make_parts(self, folder: Path) -> None:
        for part in ("ranks", *self._run.models):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def _rank_zero_writer(self, snapshot: Snapshot) -> Callable[[Path], None]:
        run = self._run
        copies: dict[str, bytes] = {}
        unread: OSError | None = None
        try:
            for name in RUN_FILES:
                if (path := run.run_dir / name).is_file():
                    copies[name] = path.read_bytes()
        except OSError as error:
            unread = error  # fails this save alone, as a refused write does

        def write(folder: Path) -> None:
            if unread is not None:
                raise unread
            dump_config(run.settings, folder / "config.yaml")
            write_json(folder / PROGRESS_FILE, snapshot.progress.model_dump(mode="json"))
            for name, content in snapshot.contents.items():
                data = content() if callable(content) else content
                if data:
                    with atomic_write(folder / name, "wb") as file:
                        file.write(data)
            for name, data in copies.items():
                (folder / name).write_bytes(data)
                sync(folder / name)
            for key, saved in run.models.items():
                model = saved.model
                dtype = str(model.dtype).removeprefix("torch.")
                if model.adapter is None:
                    base = None
                else:
                    base = (base_identity(saved.source_dir), model.adapter)
                write_model_card(
                    folder / key, model.spec, model.head, saved.source_dir, dtype, base
                )

        return write

    def _run_save(self, save: _Save) -> None:
        began = time.thread_time()
        try:
            part = self._write(save)
            if self._nodes.count > 1:
                sizes = {name: facts.bytes for name, facts in part.files.items()}
                refused = send_to_keepers(self._nodes, save.folder, sizes, self._group)
                if refused is not None:
                    part.problem = part.problem or _reason(refused)
            parts: list[Any] | None = (
                [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            )
            dist.gather_object(part, parts, dst=0, group=self._group)
            answer: list[Any] = [self._close(save, parts) if parts is not None else None]
            dist.broadcast_object_list(answer, src=0, group=self._group)
            problem, whole = answer[0]
            for act in (self._put, self._commit, self._retain):
                if problem is None:
                    problem = self._on_each_node(partial(act, save, whole))
            self._outcome = Outcome(time.monotonic() - save.began, problem)
        except Exception as error:  # finish() raises it in the training's own thread
            self._broken = error
        finally:
            if self._nodes.is_leader:
                shutil.rmtree(save.folder, ignore_errors=True)
            self._thread_seconds = time.thread_time() - began

    def _write(self, save: _Save) -> _Part:
        rank = dist.get_rank()
        part = _Part()
        try:
            for write in save.writers:
                write(save.folder)
            for name, plan in save.models.items():
                part.results[name], written = plan.write()
                part.files |= {f"{name}/{file}": facts for file, facts in written.items()}
            part.files |= file_facts(save.folder, [_generators_of(save.folder, rank)])
        except _WRITE_ERRORS as error:
            return _Part(problem=_reason(error))
        return part

    def _close(self, save: _Save, parts: Sequence[_Part]) -> tuple[str | None, dict[str, bytes]]:
        """On rank 0: write what belongs to the whole checkpoint. Returns why it failed, and these
        files where other nodes need them."""
        problem = next((part.problem for part in parts if part.problem is not None), None)
        if problem is not None:
            return problem, {}
        try:
            for name, plan in save.models.items():
                plan.close([part.results[name] for part in parts])
            files = {name: facts for part in parts for name, facts in part.files.items()}
            paths = {
                path.relative_to(save.folder).as_posix(): path for path in save.folder.rglob("*")
            }
            rest = {
                name: path for name, path in paths.items() if path.is_file() and name not in files
            }
            files |= file_facts(save.folder, rest.values())
            seconds = time.monotonic() - save.began
            manifest = save.manifest.model_copy(
                update={"files": dict(sorted(files.items())), "seconds": seconds}
            )
            write_json(save.folder / MANIFEST_FILE, manifest.model_dump(mode="json"))
            if self._nodes.count > 1:
                whole = {**rest, MANIFEST_FILE: save.folder / MANIFEST_FILE}
            else:
                whole = {}
            return None, {name: path.read_bytes() for name, path in whole.items()}
        except _WRITE_ERRORS as error:
            return _reason(error), {}

    def _on_each_node(self, act: Callable[[], None]) -> str | None:
        """Collective: have one rank of each node do something. Returns the first error of a file
        system, if any."""
        problem = None
        if self._nodes.is_leader:
            try:
                act()
            except OSError as error:
                problem = _reason(error)
        return next(filter(None, gather_values(problem, self._group)), None)

    def _put(self, save: _Save, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (save.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (save.folder / name).write_bytes(content)

    def _commit(self, save: _Save, _: Mapping[str, bytes]) -> None:
        commit_checkpoint(save.folder, save.name)

    def _retain(self, *_: Any) -> None:
        checkpoints = list_checkpoints(self._place)
        metrics = {
            name: manifest.metrics for name, manifest in readable_manifests(self._place).items()
        }
        for name in to_remove(list(checkpoints), metrics, self._keep):
            with suppress(OSError):  # the new checkpoint is complete; the next save retries
                remove_checkpoint(checkpoints[name])


def _reason(error: BaseException) -> str:
    """The file system's reason, which torch's archive writer hides behind its own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return reason_of(error)


def _check_room(needed: int, folder: Path) -> None:
    wanted = needed + _ROOM_BYTES
    free = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
    if free < wanted:
        raise OSError(
            errno.ENOSPC,
            f"{wanted / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free",
        )


def _write_generators(rank: int, state: dict[str, Any], folder: Path) -> None:
    torch.save(state, _generators_of(folder, rank))
    sync(_generators_of(folder, rank))


def _generators_of(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:05d}.pt"
