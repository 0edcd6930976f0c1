"""How far a run is: the small, readable part of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from vapo_megatron.checkpoint.manifest import Manifest, check_contents, damaged
from vapo_megatron.config.base import Section

PROGRESS_FILE = "progress.json"
# Groups that were graded and not trained yet.
GROUPS_FILE = "graded_groups.safetensors"


class PretrainingProgress(Section):
    """How far value pretraining is."""

    iterations: int = Field(0, ge=0, description="rollouts recorded")
    updates: int = Field(0, ge=0, description="critic updates of the replay that are made")
    finished: bool = Field(False, description="the critic is as good as it is to be")

    @property
    def count(self) -> int:
        """Grows with every bit of progress."""
        return self.iterations + self.updates


class Progress(Section):
    """How far a run is. sft has neither engines nor prompts nor value pretraining, and demonstrations instead."""

    step: int = Field(ge=0, description="steps done")
    pretraining: PretrainingProgress = PretrainingProgress()
    prompts: dict[str, Any] = Field(default_factory=dict, description="PromptSource.state()")
    groups: dict[str, Any] = Field(default_factory=dict, description="Ledger.state(), of a run that works ahead")
    demonstrations: str | None = Field(None, description="fingerprint of sft's data; older checkpoints have none")
    weight_version: int = Field(0, description="weight syncs to the engines; samples are marked with it")
    updates: dict[str, Any] = Field(default_factory=dict, description="SkippedUpdates.state()")
    returns: list[Any] = Field(default_factory=list, description="ReturnHistory.state(), of calibrated values")
    probe: list[list[int]] = Field(default_factory=list, description="sequences on which engines are compared next")


def read_progress(checkpoint: Path, manifest: Manifest) -> Progress:
    """How far the run was when a checkpoint was saved.

    Raises:
        BadInput: it is not what was saved.
    """
    path = checkpoint / PROGRESS_FILE
    facts = manifest.files.get(PROGRESS_FILE)
    wrong = check_contents(checkpoint, {path: facts}) if facts is not None else f"its manifest knows no {PROGRESS_FILE}"
    if wrong is not None:
        raise damaged(checkpoint, wrong)
    try:
        return Progress.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise damaged(checkpoint, f"{PROGRESS_FILE} cannot be read ({' '.join(str(error).split())[:200]})") from None
