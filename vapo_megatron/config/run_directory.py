"""Creates the directory of a run, after checking that there is room for it."""

import os
import secrets
import shutil
from pathlib import Path

from vapo_megatron.config.base import Section
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.run import RunPlace
from vapo_megatron.errors import BadInput

# Metrics, samples, logs and a report; checkpoints come on top.
_ROOM_BYTES = 64 << 20
# An empty file that only make_run_dir writes; a directory without it is never emptied.
MARKER = ".vapo_run"
PROFILE = "profile"  # folder of traces
HF_FOLDER = "hf"  # of exported models
# Files and folders of a run before its first step ends.
_BEFORE_RESULTS = {
    MARKER,
    "config.yaml",
    "environment.json",
    "logs",
    "metrics.jsonl",
    "mlflow_run_id",
    "samples",
    "tensorboard",
    "wandb",
}
# Files and folders that commands leave in a run directory.
_RESULTS = {
    "checkpoints",
    "critic_probes",
    "evaluation",
    "evaluation.json",
    HF_FOLDER,
    PROFILE,
    "recorded_rollouts",
    "report.html",
}
_FOLDERS = ("checkpoints", "evaluation", HF_FOLDER, "logs", "recorded_rollouts", "samples")


def check_room(run_dir: Path, checkpoint_bytes: int = 0) -> None:
    """Raises BadInput where the run directory cannot be made, or its disk has too little room for
    the results."""
    parent = existing(run_dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        if parent.is_dir():
            problem = "cannot be written"
        else:
            problem = "is not a folder"
        raise BadInput(
            f"run.root: {parent} {problem}, so {run_dir} cannot be made: choose a folder that "
            "this user may write"
        )
    free = shutil.disk_usage(parent).free
    needed = checkpoint_bytes + _ROOM_BYTES
    if free < needed:
        raise BadInput(
            f"run.root: {parent} has {free / 2**30:.2f} GiB free, the run needs at least "
            f"{needed / 2**30:.2f} GiB: make room, or set run.root to another disk"
        )


def check_folders(run_dir: Path) -> None:
    """Raises BadInput where something else than a folder has the name of one that a run works
    in, its own directory included."""
    for path in (run_dir, *(run_dir / name for name in _FOLDERS)):
        # A link that leads nowhere is one of them, and no file system makes a folder in its place.
        if os.path.lexists(path) and not path.is_dir():
            raise BadInput(
                f"{path}: a file or a broken link, expected a folder of the run: move it away, or "
                "choose another run.name"
            )


def existing(folder: Path) -> Path:
    """Returns the folder, or its nearest existing parent."""
    # Not Path.exists(), which raises if a parent cannot be entered.
    while not os.path.exists(folder):
        folder = folder.parent
    return folder


def make_run_dir(config: Section, run: RunPlace, keeps_exports: bool = False) -> Path:
    """Makes run.directory with `config` as config.yaml; removes a run that it replaces afterwards.

    keeps_exports: keep the models that the replaced run has exported.

    Raises:
        BadInput: a run of this name has results and run.overwrite is not set, or nothing can be
            written there.
    """
    run_dir = Path(run.directory)
    check_place(run)
    fresh = run_dir.with_name(f".{run_dir.name}.{secrets.token_hex(4)}")
    kept = {HF_FOLDER} if keeps_exports else set()
    try:
        dump_config(config, fresh / "config.yaml")
        (fresh / MARKER).touch()
        _replace(run_dir, fresh, kept)
    except (BadInput, OSError) as error:
        # dump_config names a file unknown to the user; its cause says why it failed.
        if isinstance(error, BadInput):
            cause = error.__cause__
        else:
            cause = error
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise BadInput(
            f"run.root: {run_dir} cannot be made ({reason}): make room, or set run.root to "
            "another disk"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return run_dir


def _replace(run_dir: Path, fresh: Path, kept: set[str]) -> None:
    """Replaces a run directory by a fresh one; files that no run writes stay."""
    if run_dir.exists():
        for entry in run_dir.iterdir():
            if entry.name in kept or entry.name not in _BEFORE_RESULTS | _RESULTS:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if any(run_dir.iterdir()):
            for entry in fresh.iterdir():
                entry.rename(run_dir / entry.name)
            return
        run_dir.rmdir()
    fresh.rename(run_dir)


def check_place(run: RunPlace) -> None:
    """Raises BadInput if the run directory exists and run.overwrite does not allow to replace
    it."""
    run_dir = Path(run.directory)
    check_folders(run_dir)
    if not run_dir.exists():
        return
    if not any(run_dir.iterdir()) or _has_no_results(run_dir):
        return
    if not run.overwrite:
        raise BadInput(
            f"run.name={run.name}: {run_dir} exists: choose another name, set run.resume=auto to "
            "continue it, or run.overwrite=true to replace it"
        )
    if run_dir.is_symlink():
        raise BadInput(
            f"run.overwrite: {run_dir} is a link: remove it yourself, or choose another name"
        )
    if not (run_dir / MARKER).is_file():
        raise BadInput(
            f"run.overwrite: {run_dir} is not a run directory (it has no {MARKER}): remove it "
            "yourself"
        )


def _has_no_results(run_dir: Path) -> bool:
    """Whether the run ended before its first result; such a directory is replaced without
    run.overwrite."""
    names = {path.name for path in run_dir.iterdir()}
    metrics = run_dir / "metrics.jsonl"
    return (
        MARKER in names
        and names <= _BEFORE_RESULTS
        and not (metrics.exists() and metrics.stat().st_size)
    )
