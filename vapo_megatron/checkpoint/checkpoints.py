"""The folder of a run's checkpoints: which exist, which are kept, and how one is written.

A checkpoint is written to a hidden folder and renamed once all of it is on disk, so any folder with
a checkpoint's name is complete. The newest is found by looking; there is no pointer that could be
stale.
"""

import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vapo_megatron.config.run import RetentionConfig
from vapo_megatron.config.run_directory import HF_FOLDER
from vapo_megatron.files import atomic_write, parse_json, put_in_place

CHECKPOINT_FOLDER = "checkpoints"
# Rollouts that value pretraining has recorded; checkpoints name their files.
RECORD_FOLDER = "recorded_rollouts"
CHECKPOINT_HELP = (
    "restore it from a copy, or delete this folder to resume from the checkpoint before it"
)
_NAME = re.compile(r"step_(\d{6,})(?:_pretraining_(\d{6,}))?")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """How far the run was: steps done and, within value pretraining, rollouts and updates done."""

    step: int
    pretraining: float = float("inf")

    def __str__(self) -> str:
        if self.pretraining == float("inf"):
            tail = ""
        else:
            tail = f"_pretraining_{int(self.pretraining):06d}"
        return f"step_{self.step:06d}{tail}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None if it is not the name of a checkpoint."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]) if match[2] else float("inf"))


def list_checkpoints(run_dir: Path) -> dict[CheckpointName, Path]:
    """The checkpoints of a run, oldest first."""
    folder = run_dir / CHECKPOINT_FOLDER
    if not folder.is_dir():
        return {}
    checkpoints = {
        name: path
        for path in folder.iterdir()
        if (name := CheckpointName.parse(path.name)) is not None
    }
    return dict(sorted(checkpoints.items()))


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint to continue from."""
    return next(reversed(list_checkpoints(run_dir).values()), None)


def open_checkpoint(run_dir: Path, name: CheckpointName) -> Path:
    """A new hidden folder in which a checkpoint is written. Raises OSError."""
    folder = run_dir / CHECKPOINT_FOLDER / f".{name}.{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return folder


def commit_checkpoint(folder: Path, name: CheckpointName) -> Path:
    """Give a written folder its name, once all of it is on the disk. A checkpoint that has the name
    is replaced by it. Raises OSError; the folder is then as it was."""
    target = folder.with_name(str(name))
    put_in_place(folder, target)  # a kill at it: see restore_replaced
    return target


def restore_replaced(run_dir: Path) -> None:
    """Give a checkpoint its name again that was about to be replaced when its run was killed: it is
    found from then on. Raises OSError."""
    for path in (run_dir / CHECKPOINT_FOLDER).glob(".*.old"):
        target = path.with_name(path.name[1:].partition(".")[0])
        if not target.exists():
            path.rename(target)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what interrupted saves and removals have left; a checkpoint that was about to be
    replaced has its name again. Raises OSError."""
    restore_replaced(run_dir)
    for path in (run_dir / CHECKPOINT_FOLDER).glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; it loses its name at once, so that no half of it is ever taken for
    one."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def to_remove(
    names: Sequence[CheckpointName],
    metrics: Mapping[CheckpointName, Mapping[str, float]],
    config: RetentionConfig,
) -> list[CheckpointName]:
    """The checkpoints that retention does not keep; metrics: of evaluations at their steps, by
    checkpoint."""
    ordered = sorted(names)
    kept = set(ordered[-config.last :])
    if config.every is not None:
        kept |= {name for name in ordered if name.step > 0 and name.step % config.every == 0}
    best = best_checkpoint(metrics, config)
    return [name for name in ordered if name not in kept and name != best]


def best_checkpoint(
    metrics: Mapping[CheckpointName, Mapping[str, float]], config: RetentionConfig
) -> CheckpointName | None:
    """The checkpoint with the highest value of the metric that retention looks at, the earliest of
    equals."""
    if config.best is None:
        return None
    values = {name: row[config.best] for name, row in sorted(metrics.items()) if config.best in row}
    return max(values, key=values.__getitem__, default=None)


FINAL = "final"
_STEP_FILE = "step.json"


def final_dir(run_dir: Path) -> Path:
    """The folder of the final model, with one for each model in it."""
    return run_dir / HF_FOLDER / FINAL


def final_step(run_dir: Path) -> int | None:
    """The step of the final model; None where it is missing, or was not written to its end."""
    return _written_step(final_dir(run_dir))


def _written_step(folder: Path) -> int | None:
    try:
        return int(parse_json((folder / _STEP_FILE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def exported_step(folder: Path) -> int | None:
    """The step of the models in hf/<name> of a run; None where it is not known."""
    if folder.parent.name != HF_FOLDER:
        return None
    if folder.name == FINAL:
        return _written_step(folder)
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else None


def mark_final(run_dir: Path, step: int | None) -> None:
    """Say which step the final model is of; None while it is written. Raises BadInput where that
    fails."""
    with atomic_write(final_dir(run_dir) / _STEP_FILE) as file:
        json.dump({"step": step}, file)
