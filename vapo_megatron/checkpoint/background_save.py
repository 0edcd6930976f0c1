"""One checkpoint on its way to the disk, in a thread of every rank, while training goes on.

Nothing here uses the collectives of training: ranks meet in a process group that only these threads use. The
checkpoint is committed as soon as all have written, whatever the training is doing then.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CheckpointName,
    commit_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    to_remove,
)
from vapo_megatron.checkpoint.dist_saver import PlannedSave
from vapo_megatron.checkpoint.manifest import (
    MANIFEST_FILE,
    MODEL_PART_FILE,
    FileFacts,
    Manifest,
    ModelPart,
    file_facts,
    readable_manifests,
    write_json,
)
from vapo_megatron.checkpoint.nodes import Nodes, send_to_keepers
from vapo_megatron.collectives import gather_values
from vapo_megatron.config.run import RetentionConfig
from vapo_megatron.errors import BadInput, reason_of

# What a person has to mend: a full disk, an exceeded quota or limit, missing rights. Other errors may pass.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


@dataclass(frozen=True)
class Problem:
    """Why a save failed: one line, and whether it would fail again until somebody does something."""

    reason: str
    lasting: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """torch's archive writer hides what the file system said behind an error of its own."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.strerror:
                return cls(cause.strerror, cause.errno in _LASTING)
            cause = cause.__cause__ or cause.__context__
        return cls(reason_of(error), lasting=False)


@dataclass(frozen=True)
class Outcome:
    """How a save ended; the same on every rank."""

    seconds: float
    problem: Problem | None = None


@dataclass(frozen=True)
class CheckpointJob:
    """What one rank writes of a checkpoint; everything in it is a copy that training leaves alone.

    Attributes:
        run_dir: of the run.
        name: of the checkpoint.
        folder: hidden, where the checkpoint is written.
        models: this rank's part of each model.
        writers: of this rank's other files; each is given the folder and may raise OSError or BadInput.
        manifest: what rank 0 writes at the end; its files are filled in.
        keep: which checkpoints stay once this one is there.
        nodes: who shares the folder: all ranks one on the disk, those of a node one in its host memory.
    """

    run_dir: Path
    name: CheckpointName
    folder: Path
    models: Mapping[str, PlannedSave]
    writers: Sequence[Callable[[Path], None]]
    manifest: Manifest
    keep: RetentionConfig
    nodes: Nodes


@dataclass
class _Part:
    """What a rank tells rank 0 when it has written."""

    results: dict[str, list[Any]]
    files: dict[str, FileFacts]
    problem: Problem | None = None


class BackgroundSave:
    """A save that has begun."""

    def __init__(self, job: CheckpointJob, group: Any) -> None:
        """Collective. group: a CPU process group of all ranks that no other thread uses."""
        self._job, self._group = job, group
        self._outcome: Outcome | None = None
        self._broken: Exception | None = None
        self._started = time.monotonic()
        self._whole: set[str] = set()  # on rank 0: files that are no rank's own
        self._thread = threading.Thread(target=self._run, name="save-checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether it is not over on this rank."""
        return self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether it is known on this rank that it failed."""
        return self._broken is not None or (self._outcome is not None and self._outcome.problem is not None)

    def wait(self) -> Outcome:
        """How it ended, once it has. Raises what broke the exchange with the other ranks, where one of them is gone."""
        self._thread.join()
        if self._broken is not None:
            raise self._broken
        assert self._outcome is not None
        return self._outcome

    def _run(self) -> None:
        job, rank = self._job, dist.get_rank()
        try:
            written = self._write()
            if job.nodes.count > 1:
                written.problem = self._send(written) or written.problem
            parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
            dist.gather_object(written, parts, dst=0, group=self._group)
            problem = self._close(parts) if parts is not None else None
            if job.nodes.count > 1:
                problem = self._close_on_nodes(problem)
            elif rank == 0:
                problem = problem or _problem_in(self._commit) or _problem_in(self._retain)
            box = [Outcome(time.monotonic() - self._started, problem)]
            dist.broadcast_object_list(box, src=0, group=self._group)
            self._outcome = box[0]
        except Exception as error:  # wait() raises it in the training's own thread
            self._broken = error
        finally:
            if job.nodes.is_leader:
                shutil.rmtree(job.folder, ignore_errors=True)

    def _write(self) -> _Part:
        job, rank = self._job, dist.get_rank()
        try:
            for write in job.writers:
                write(job.folder)
            results: dict[str, list[Any]] = {}
            files: dict[str, FileFacts] = {}
            for name, plan in job.models.items():
                results[name], written = plan.write()
                files |= {f"{name}/{file}": facts for file, facts in written.items()}
            files |= file_facts(job.folder, (job.folder / "ranks").glob(f"{rank:05d}.pt"))
            return _Part(results, files)
        except (OSError, BadInput, RuntimeError) as error:  # torch's own writer turns OSError into RuntimeError
            return _Part({}, {}, Problem.of(error))

    def _send(self, own: _Part) -> Problem | None:
        """Collective: have a second copy of each rank's files on the next node."""
        sizes = {name: facts.bytes for name, facts in own.files.items()}
        failed = send_to_keepers(self._job.nodes, self._job.folder, sizes, self._group)
        return Problem.of(failed) if failed is not None else None

    def _close(self, parts: Sequence[_Part]) -> Problem | None:
        """On rank 0: write what belongs to the whole checkpoint; what was in the way, if something was."""
        job = self._job
        problem = next((part.problem for part in parts if part.problem is not None), None)
        if problem is not None:
            return problem
        try:
            for name, plan in job.models.items():
                plan.close([part.results[name] for part in parts])
                part = ModelPart(
                    checkpoint_id=job.manifest.checkpoint_id, run_id=job.manifest.run_id, step=job.manifest.step
                )
                write_json(job.folder / name / MODEL_PART_FILE, part.model_dump())
            files = {name: facts for part in parts for name, facts in part.files.items()}
            rest = [path for path in sorted(job.folder.rglob("*")) if path.is_file()]
            rest = [path for path in rest if path.relative_to(job.folder).as_posix() not in files]
            files |= file_facts(job.folder, rest)
            seconds = time.monotonic() - self._started
            manifest = job.manifest.model_copy(update={"files": dict(sorted(files.items())), "seconds": seconds})
            write_json(job.folder / MANIFEST_FILE, manifest.model_dump(mode="json"))
            self._whole = {*(path.relative_to(job.folder).as_posix() for path in rest), MANIFEST_FILE}
        except (OSError, BadInput, RuntimeError) as error:
            return Problem.of(error)
        return None

    def _close_on_nodes(self, problem: Problem | None) -> Problem | None:
        """Collective: every node gets what belongs to the whole, then all commit, then all let go of others."""
        whole = {name: (self._job.folder / name).read_bytes() for name in self._whole}
        box: list[Any] = [problem, whole]
        dist.broadcast_object_list(box, src=0, group=self._group)
        problem, whole = box
        for step in (lambda: self._put(whole), self._commit, self._retain):
            if problem is not None:
                return problem
            problems = gather_values(_problem_in(step) if self._job.nodes.is_leader else None, self._group)
            problem = next((each for each in problems if each is not None), None)
        return problem

    def _put(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (self._job.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self._job.folder / name).write_bytes(content)

    def _commit(self) -> None:
        commit_checkpoint(self._job.folder, self._job.name)

    def _retain(self) -> None:
        checkpoints = list_checkpoints(self._job.run_dir)
        metrics = {name: manifest.metrics for name, manifest in readable_manifests(self._job.run_dir).items()}
        for name in to_remove(list(checkpoints), metrics, self._job.keep):
            with suppress(OSError):  # the new checkpoint is there; the next save tries again
                remove_checkpoint(checkpoints[name])


def _problem_in(step: Callable[[], None]) -> Problem | None:
    """Take a step that the file system may refuse: why it failed, if it did."""
    try:
        step()
    except OSError as error:
        return Problem.of(error)
    return None
