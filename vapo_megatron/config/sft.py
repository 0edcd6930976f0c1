"""The config of `vapo-megatron sft`."""

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
    """Supervised fine-tuning, for data.steps or data.epochs."""

    run: ResumableRun = ResumableRun(name="sft")
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    data: SftDataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    robustness: RobustnessConfig = RobustnessConfig()
