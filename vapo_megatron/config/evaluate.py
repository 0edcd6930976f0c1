"""The config of `vapo-megatron evaluate`."""

from typing import Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.data import EvaluationDataConfig, ServerConfig
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.run import RunPlace


class EvaluateConfig(Section):
    """Evaluation of a checkpoint on engines started for it, or of a model behind an
    OpenAI-compatible server."""

    CONFLICTS = (
        (
            "server.api=completions",
            "data.prompt.chat_template",
            "plain text has no chat template: set server.api=chat or "
            "data.prompt.chat_template=false",
        ),
        (
            "rollout.load_format=dummy",
            "",
            "it leaves the engines without the checkpoint's weights: set auto",
        ),
        (
            "rollout.external_urls",
            "",
            "those engines have a trainer's weights: leave it out, or describe an external "
            "server in section server",
        ),
    )

    run: RunPlace = RunPlace(name="evaluation")
    model: ModelConfig | None = Field(None, description="checkpoint to evaluate on our own engines")
    server: ServerConfig | None = Field(
        None, description="external server to evaluate, instead of model"
    )
    data: EvaluationDataConfig
    sampling: SamplingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.server is None):
            if self.model is None:
                state = "neither is"
            else:
                state = "both are"
            raise ValueError(
                f"{state} given of model (our own engines) and server (external): give one of them"
            )
        self.data.check_rewards(self.reward)
        return self
