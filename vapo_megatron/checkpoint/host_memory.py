"""The folder of a run in host memory: it holds copies of the state that outlive the ranks, whose
processes meet there.

There is one folder per run and machine in /dev/shm, which holds checkpoints as a run directory
does. It belongs to the process that made it: the next process that makes such a folder removes
the folders of dead processes. A folder that a batch job names outlives its processes for 15
minutes, for the job's next step; the job removes it.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    RECORD_FOLDER,
    CheckpointName,
    list_checkpoints,
)
from vapo_megatron.checkpoint.lease import Holder
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.files import atomic_write

_logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
_PREFIX = "vapo-run-"
# Names a job's folder of this node (slurm/task.sh).
_JOB_VARIABLE = "VAPO_HOST_MEMORY"
_JOB_PREFIX = "vapo-job-"
# So long after it was written to last, a job's folder without a living owner is waiting for the
# job's next step.
_GRACE_SECONDS = 900.0
_OWNER_FILE = "owner.json"
# The only copy of a state that no checkpoint holds: it is kept until its run resumes, or is
# removed.
_KEPT_FILE = "kept"


def host_memory_of(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of a run's copies, whether it exists or not."""
    if named := environment.get(_JOB_VARIABLE):
        return Path(named)
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return ROOT / f"{_PREFIX}{digest[:16]}"


def job_memory(
    run_dir: Path, is_first: bool, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """The folder that the job names for this node, made if need be; None without one, or if it
    cannot be used. Copies of another run of the job are removed. is_first: this process is the
    job's first on its node."""
    if _JOB_VARIABLE not in environment:
        return None
    folder = host_memory_of(run_dir, environment)
    here = Holder.here(environment)
    link = folder / RECORD_FOLDER
    record = run_dir.absolute() / RECORD_FOLDER
    if is_first:
        _remove_abandoned(here, folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # Its name can be guessed, and its contents are trusted.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError("it is somebody else's")
        if is_first:
            if link.is_symlink() and link.readlink() != record:
                shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)
                link.unlink()
            with atomic_write(folder / _OWNER_FILE, "w") as file:
                file.write(json.dumps(asdict(here)))
        with suppress(FileExistsError):
            link.symlink_to(record)
    except (OSError, BadInput) as error:
        _logger.warning("%s: cannot be used (%s): no copies are kept in host memory", folder, error)
        return None
    return folder


def copies_left(run_dir: Path) -> Path | None:
    """The folder in which a starter of this run that was killed on this machine has left copies;
    None for none."""
    place = host_memory_of(run_dir)
    try:
        is_ours = not place.is_symlink() and place.stat().st_uid == os.getuid()
    except OSError:
        return None
    if is_ours and _JOB_VARIABLE not in os.environ:
        return place
    return None


@contextmanager
def host_memory(run_dir: Path, keep_copies: bool = False) -> Iterator[Path | None]:
    """A folder for copies of a run that this process holds the lease of; None where the system
    refuses.

    It is removed at the end, with the folders of killed processes of this machine. Where the run
    was interrupted, or failed before a checkpoint was as new as the copy that it began with, a copy
    that is newer than the last checkpoint is kept, and named. keep_copies: take over the copies
    that an earlier starter of this run has left.

    Raises:
        TryAgain: as in the body, with the place of the copy that is kept.
    """
    place = host_memory_of(run_dir)
    here = Holder.here(os.environ)
    _remove_abandoned(here, place)
    try:
        make_folder(run_dir, place, keep_copies)
    except OSError as error:
        _logger.warning(
            "%s: cannot be used (%s): ranks that are killed are not started again from a copy",
            ROOT,
            error.strerror,
        )
        yield None
        return
    began = max(list_checkpoints(place), default=None)
    kept = False
    try:
        yield place
    except BaseException as error:
        copies = list_checkpoints(place)
        asked = isinstance(error, TryAgain)
        saved: Collection[CheckpointName] = ()
        with suppress(OSError):  # a disk that does not answer has no newer one
            saved = list_checkpoints(run_dir)
        if asked or isinstance(error, OSError):
            state = max(copies, default=None)
        else:
            state = began
        if copies and state is not None and all(name < state for name in saved):
            (place / _KEPT_FILE).touch()
            kept = True
            notice = f"the state is saved in host memory, {copies[max(copies)]}"
            if asked:
                raise TryAgain(
                    f"{error}; {notice}: a start on this machine finds it there"
                ) from error
            _logger.warning("%s: a start on this machine finds it there", notice)
        raise
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)


def make_folder(run_dir: Path, place: Path, keep_copies: bool = False) -> None:
    """Make the folder of a run in place of an earlier one, whose copies may be kept. Raises
    OSError."""
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=ROOT))
    (folder / _OWNER_FILE).write_text(json.dumps(asdict(Holder.here(os.environ))))
    # A checkpoint names what value pretraining has recorded by its place in the run directory.
    (folder / RECORD_FOLDER).symlink_to(run_dir.absolute() / RECORD_FOLDER)
    if keep_copies:
        (place / CHECKPOINT_FOLDER).rename(folder / CHECKPOINT_FOLDER)
        if (place / _KEPT_FILE).exists():
            (folder / _KEPT_FILE).touch()
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)


def _remove_abandoned(here: Holder, ours: Path) -> None:
    """Remove the folders of processes of this machine that are gone, except ours and those that
    wait for a job's next step."""
    for path in (
        *ROOT.glob(f"{_PREFIX}*"),
        *ROOT.glob(f".{_PREFIX}*"),
        *ROOT.glob(f"{_JOB_PREFIX}*"),
    ):
        # Another user's, or one that is just being made
        with suppress(OSError, ValueError, TypeError, KeyError):
            if path == ours or _is_kept(path) or _is_waiting(path, ours):
                continue
            if Holder.from_json((path / _OWNER_FILE).read_text()).lives(here) is False:
                shutil.rmtree(path)


def _is_kept(path: Path) -> bool:
    """Whether a folder is the only place of a state: its run has no checkpoint that is as new."""
    if not (path / _KEPT_FILE).exists():
        return False
    run_dir = (path / RECORD_FOLDER).readlink().parent
    copies = list_checkpoints(path)
    return (
        run_dir.is_dir()
        and bool(copies)
        and all(name < max(copies) for name in list_checkpoints(run_dir))
    )


def _is_waiting(path: Path, ours: Path) -> bool:
    """Whether it may be between two steps of its job, which Slurm has not requeued since; names are
    vapo-job-JOB.RESTART.NODE (slurm/task.sh)."""
    if not path.name.startswith(_JOB_PREFIX):
        return False
    job, start = path.name.split(".")[:2]
    our_job, our_start = (*ours.name.split("."), "")[:2]
    written = max(
        each.stat().st_mtime for each in (path, path / _OWNER_FILE, *path.glob(CHECKPOINT_FOLDER))
    )
    return not (job == our_job and start != our_start) and time.time() - written < _GRACE_SECONDS
