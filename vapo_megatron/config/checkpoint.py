"""How the state of a whole run is saved, so that it can go on (docs/checkpoints.md)."""

from pydantic import Field

from vapo_megatron.config.base import Section


class RetentionConfig(Section):
    """Which checkpoints stay; all that are not named here are removed."""

    last: int = Field(2, ge=1, description="the newest")
    every: int | None = Field(None, ge=1, description="also those of steps that are a multiple of this")
    best: str | None = Field(None, description="also that of the highest of this metric: evaluation/aime24_avg@32")


class CheckpointConfig(Section):
    """Checkpoints of saved state under checkpoints/, from which run.resume=auto goes on."""

    every: int | None = Field(10, ge=1, description="steps between saves; none: no saves by steps")
    every_minutes: float | None = Field(
        30.0, gt=0, description="time between saves, within value pretraining too; none: no saves by time"
    )
    at_end: bool = Field(True, description="save after the last step, so that a larger run.steps can go on from there")
    in_memory_every: int | None = Field(
        1,
        ge=1,
        description="least steps between copies in host memory (/dev/shm), from which ranks that were killed are "
        "started again; further apart where they would take above 5 % of the time; none: from the last checkpoint",
    )
    asynchronous: bool = Field(True, description="write while training goes on, from a copy in host memory")
    keep: RetentionConfig = RetentionConfig()
    job_timeout_s: float | None = Field(
        None, gt=0, description="seconds after which the run saves and ends; SLURM_JOB_END_TIME counts besides"
    )
    margin_s: float = Field(
        180.0, ge=0, description="seconds left before a time limit, over the longest step and the longest save"
    )
