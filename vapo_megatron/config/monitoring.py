"""What a run shows and keeps of itself."""

from typing import Literal

from pydantic import Field

from vapo_megatron.config.base import Section


class AlarmsConfig(Section):
    """Limits beyond which a step's metrics are called trouble. Collapses are measured against the first steps."""

    reference_steps: int = Field(3, ge=1, description="first steps whose mean entropy and length are the reference")
    entropy_collapse: float = Field(0.02, ge=0, le=1, description="entropy below this share of the reference")
    length_collapse: float = Field(
        0.25, ge=0, le=1, description="mean response length below this share of the reference"
    )
    train_infer_kl: float = Field(
        0.05, gt=0, description="mean KL of the trainer's policy to the rollout policy, nats per token"
    )
    truncated_share: float = Field(0.5, gt=0, le=1, description="share of responses cut off at the token limit")
    failed_grades: float = Field(0.05, ge=0, le=1, description="share of responses whose verification failed")
    frac_zero_std_groups: float = Field(0.95, gt=0, le=1, description="share of groups whose rewards are all equal")


class WandbConfig(Section):
    """Weights & Biases; needs `pip install vapo-megatron[wandb]`. The run's id is kept in its directory."""

    enabled: bool = Field(False, description="whether it is used")
    project: str = Field("vapo-megatron", min_length=1, max_length=128, description="project that the run belongs to")
    entity: str | None = Field(None, min_length=1, description="team or user; default: that of the login")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: written under wandb/ in the run directory, sent later by `wandb sync`"
    )
    tags: tuple[str, ...] = Field((), description="tags of the run")
    samples: int = Field(8, ge=0, description="responses a step in the table of samples; 0: none")


class MonitoringConfig(Section):
    """Where the metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="scalars under tensorboard/")
    wandb: WandbConfig = WandbConfig()
    sample_groups_per_step: int = Field(8, ge=0, description="groups whose responses are kept under samples/; 0: none")
    sample_token_estimates: int = Field(
        4, ge=0, description="of the kept responses, those whose values and advantages are kept token by token; 0: none"
    )
    alarms: AlarmsConfig = AlarmsConfig()
