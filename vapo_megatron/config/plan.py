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
    informative_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="groups with both correct and incorrect responses, which dynamic sampling keeps; it falls as the "
        "policy learns",
    )
    grade_seconds: float = Field(
        0.02, ge=0, description="of one response on one of reward.workers, while others are generated"
    )
    gpu_benchmark: str | None = Field(
        None,
        description="JSON of `python -m benchmarks.gpu --json FILE` on such a GPU: what it reached stands in for "
        "hardware.efficiency.linear, .attention and .fp8_gain",
    )


class PlanConfig(TrainConfig):
    """A training config, the accelerators it is meant for, and what a plan has to assume about the run.

    `train` refuses both sections: give them as overrides, or in a YAML that `extends` the training config.
    """

    hardware: HardwareConfig = HardwareConfig()
    plan: PlannedRunConfig = PlannedRunConfig()
