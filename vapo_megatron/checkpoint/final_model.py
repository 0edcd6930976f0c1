"""The model that a run ends with: where it lies, and of which step it is."""

import json
from pathlib import Path

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.errors import BadInput

HF_FOLDER = "hf"
FINAL = "final"
_STEP_FILE = "step.json"


def final_dir(run_dir: Path) -> Path:
    """Where it lies: a folder for each model."""
    return run_dir / HF_FOLDER / FINAL


def final_step(run_dir: Path) -> int | None:
    """The step that the final model is of; None where it is missing, or was not written to the end."""
    try:
        return int(json.loads((final_dir(run_dir) / _STEP_FILE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin_final(run_dir: Path) -> None:
    """The final model is about to be replaced: until end_final it is of no step. Raises BadInput."""
    path = final_dir(run_dir) / _STEP_FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be removed ({error.strerror}): make the folder writable") from error


def end_final(run_dir: Path, step: int) -> None:
    """All of the final model is written. Raises BadInput where the file system refuses."""
    with atomic_write(final_dir(run_dir) / _STEP_FILE) as file:
        json.dump({"step": step}, file)
