"""The configs of `vapo-megatron critic`, a training config and how its critic is probed, and of `pretrain-critic`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.train import TrainConfig


class CriticProbesConfig(Section):
    """Which states are continued, and how often: prompts x responses_per_prompt x quantiles x continuations."""

    checkpoint: str | None = Field(
        "final",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="actor and critic of the run's hf/<this>, the policy being model.path where that has no actor; "
        "none: model.path and critic.init_path",
    )
    set: str | None = Field(
        None,
        description="name of the set of data.eval that prompts come from; none: the first one",
    )
    prompts: int = Field(64, ge=2, description="of the set, drawn at random; fewer where it has fewer")
    responses_per_prompt: int = Field(4, ge=2, description="responses that states are taken from")
    quantiles: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        (0.0, 0.1, 0.25, 0.5, 0.75, 0.9), min_length=1, description="where in a response: share of its tokens before"
    )
    continuations: int = Field(8, ge=2, description="of each state; their mean return is its value")
    bootstrap: int = Field(1000, ge=100, description="draws of prompts that intervals come from")
    seed: int = Field(1, ge=0, lt=2**62, description="of prompts, responses, continuations and intervals")


class ProbedRunConfig(TrainConfig):
    """A training config and the probes of its critic; `train` refuses the section critic_probes."""

    critic_probes: CriticProbesConfig = CriticProbesConfig()


class CriticPretrainingConfig(TrainConfig):
    """A training config of which the critic alone is trained, on recorded responses."""

    @model_validator(mode="after")
    def _there_is_something_to_learn(self) -> Self:
        if not self.has_critic_model or not self.value_pretraining.records:
            raise ValueError(
                f"pretrain-critic needs value_pretraining.from, recorded responses, and a critic that is a model: "
                f"estimator={self.algorithm.advantage.estimator}, critic.kind={self.critic.kind}"
            )
        return self

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks of a replica of the critic: there is no actor."""
        return {"critic": self.critic.layout.model_size}
