"""How far a run is: the small, readable part of a saved unit."""

from typing import Any

from pydantic import Field

from vapo_megatron.config.base import Section

PROGRESS_FILE = "progress.json"


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
    """How far a run is. sft has neither engines nor prompts nor value pretraining."""

    step: int = Field(ge=0, description="steps done")
    pretraining: PretrainingProgress = PretrainingProgress()
    prompts: dict[str, Any] = Field(default_factory=dict, description="PromptSource.state()")
    weight_version: int = Field(0, description="hand-overs to the engines; samples are marked with it")
    probe: list[list[int]] = Field(default_factory=list, description="sequences on which engines are compared next")
