"""The config of `vapo-megatron plan` and `vapo-megatron doctor`: a training config and two sections of their own."""

from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.hardware import HardwareConfig
from vapo_megatron.config.train import TrainConfig


class SimulationConfig(Section):
    """What `plan --simulate` takes for granted besides (docs/async.md)."""

    steps: int = Field(6, ge=1, description="that are counted, after those in which the run settles")
    engine_gpus: int | None = Field(
        None, ge=1, description="GPUs of engines of their own; none: the split of GPUs that is best"
    )
    response_spread: float | None = Field(
        None,
        gt=0,
        description="sigma of response lengths that are log-normal, cut at sampling.max_new_tokens; none: the tail of "
        "a plan",
    )
    engine_hours_between_failures: float = Field(24.0, gt=0, description="of one engine, in the column with failures")
    restart_seconds: float = Field(300.0, ge=0, description="until an engine that failed answers again")


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
    simulation: SimulationConfig = SimulationConfig()


class PlanConfig(TrainConfig):
    """A training config, the accelerators it is meant for, and what a plan has to assume about the run.

    `train` refuses both sections: give them as overrides, or in a YAML that `extends` the training config.
    """

    hardware: HardwareConfig = HardwareConfig()
    plan: PlannedRunConfig = PlannedRunConfig()
