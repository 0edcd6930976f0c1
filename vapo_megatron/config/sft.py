"""The config of `vapo-megatron sft`."""

from vapo_megatron.config.base import Section
from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.config.monitoring import MonitoringConfig
from vapo_megatron.config.run import ClusterConfig, RunPlace, SftDataConfig


class SftConfig(Section):
    """Supervised fine-tuning; data.steps or data.epochs say how long."""

    run: RunPlace = RunPlace(name="sft")
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    data: SftDataConfig
    monitoring: MonitoringConfig = MonitoringConfig()
