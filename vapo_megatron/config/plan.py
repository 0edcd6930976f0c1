"""The config of `vapo-megatron plan` and `vapo-megatron doctor`: a training config and two sections of their own."""

from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.hardware import HardwareConfig
from vapo_megatron.config.train import TrainConfig


class PlannedRunConfig(Section):
    """What `plan` cannot know: the number of GPUs, the mean lengths of prompts and responses."""

    gpus: int | None = Field(None, ge=1, description="GPUs of the run; none: cluster.ranks, else one node")
    mean_prompt_tokens: int | None = Field(None, ge=1, description="none: half of data.max_prompt_tokens")
    mean_response_tokens: int | None = Field(
        None, ge=1, description="over the whole run; none: half of sampling.max_new_tokens"
    )


class PlanConfig(TrainConfig):
    """A training config, the accelerators it is meant for, and what a plan has to assume about the run.

    `train` refuses both sections: give them as overrides, or in a YAML that `extends` the training config.
    """

    hardware: HardwareConfig = HardwareConfig()
    plan: PlannedRunConfig = PlannedRunConfig()
