"""What a run shows and keeps of itself."""

from typing import Literal

from pydantic import Field

from vapo_megatron.config.base import Section

AlarmName = Literal[
    "length_collapse",
    "entropy_collapse",
    "entropy_explosion",
    "accuracy_collapse",
    "value_below_baseline",
    "value_bias",
    "critic_fault",
    "evaluation_falls",
    "train_infer_gap",
    "gradient_spike",
    "skipped_updates",
    "truncated_text",
    "failed_grades",
    "engine_failures",
]


class AlarmsConfig(Section):
    """What alarms do besides being told (docs/alarms.md)."""

    stop: tuple[AlarmName, ...] = Field((), description="alarms that end the run after the step (exit 1)")
    off: tuple[AlarmName, ...] = Field((), description="alarms that are never raised")


class WandbConfig(Section):
    """Weights & Biases; needs `pip install vapo-megatron[wandb]`. WANDB_ENTITY and WANDB_TAGS say team and tags."""

    enabled: bool = Field(False, description="whether it is used")
    project: str = Field("vapo-megatron", min_length=1, max_length=128, description="project that the run belongs to")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: written under wandb/ in the run directory, sent later by `wandb sync`; none: what "
        "WANDB_MODE in the environment says, else online",
    )
    samples: int = Field(8, ge=0, description="responses a step in the table of samples; 0: none")


class MonitoringConfig(Section):
    """Where the metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="scalars under tensorboard/")
    wandb: WandbConfig = WandbConfig()
    sample_groups_per_step: int = Field(8, ge=0, description="groups whose responses are kept under samples/; 0: none")
    alarms: AlarmsConfig = AlarmsConfig()
