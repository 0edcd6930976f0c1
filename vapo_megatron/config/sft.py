"""The config of `vapo-megatron sft`."""

from pydantic import model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.config.run import (
    CheckpointConfig,
    ClusterConfig,
    MonitoringConfig,
    ResumableRun,
    RobustnessConfig,
    SftDataConfig,
)


class SftConfig(Section):
    """Supervised fine-tuning; data.steps or data.epochs say how long."""

    run: ResumableRun = ResumableRun(name="sft")
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    data: SftDataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    robustness: RobustnessConfig = RobustnessConfig()

    @model_validator(mode="after")
    def _warmup_is_in_updates(self) -> "SftConfig":
        if self.actor.optimizer.warmup_unit != "updates":
            raise ValueError("actor.optimizer.warmup_unit=rollouts: demonstrations have none, set updates")
        return self
