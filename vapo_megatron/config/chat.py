"""Config of `vapo-megatron chat`: what of a training config a conversation needs."""

from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig


class ChatDataConfig(Section):
    """How a message becomes a prompt."""

    prompt: PromptTemplate = PromptTemplate()


class ChatConfig(Section):
    """A conversation with a checkpoint on an engine of this machine."""

    model: ModelConfig
    data: ChatDataConfig = ChatDataConfig()
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=1024)
    rollout: RolloutConfig = RolloutConfig()
    seed: int = Field(1, ge=0, lt=2**62, description="seed of the responses")
