"""The configs of `vapo-megatron train` and `vapo-megatron evaluate`: all sections, and what holds between them."""

from typing import Self

from pydantic import Field, model_validator

from vapo_megatron.config.algorithm import AlgorithmConfig, ValuePretrainingConfig
from vapo_megatron.config.base import Section
from vapo_megatron.config.data import DataConfig, EvaluationDataConfig
from vapo_megatron.config.model import ActorConfig, CriticConfig, ModelConfig
from vapo_megatron.config.monitoring import MonitoringConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.run import BatchConfig, ClusterConfig, EvaluationConfig, ExportConfig, RunConfig


class TrainConfig(Section):
    """Reinforcement learning."""

    preset: str | None = Field(None, description="one of config/presets: the defaults that this file starts from")
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        self.algorithm.check(self.batch.samples_per_prompt)
        return self

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks of a replica, by model."""
        sizes = {"actor": self.actor.layout.model_size}
        if self.algorithm.uses_critic:
            sizes["critic"] = self.critic.layout.model_size
        return sizes


class EvaluateConfig(Section):
    """Evaluation of a checkpoint on engines of its own."""

    run: RunConfig = RunConfig(name="evaluation")
    model: ModelConfig
    data: EvaluationDataConfig
    sampling: SamplingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _engines_read_the_checkpoint(self) -> Self:
        if self.rollout.load_format == "dummy":
            raise ValueError("rollout.load_format=dummy leaves the engines without the checkpoint's weights: set auto")
        return self
