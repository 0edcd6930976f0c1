"""Configs of `vapo-megatron critic` (a training config with the probes of its critic) and
`pretrain-critic`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.train import TrainConfig


class CriticProbesConfig(Section):
    """How many states are continued, and how often: prompts x responses_per_prompt x quantiles x
    continuations."""

    checkpoint: str | None = Field(
        "final",
        pattern=r"^[A-Za-z0-9._-]+$",
        description=(
            "use actor and critic of the run's hf/<this> (and model.path as the policy if there is "
            "no actor); none: model.path and critic.init_path"
        ),
    )
    set: str | None = Field(
        None, description="name of the data.eval set that prompts come from; none: the first set"
    )
    prompts: int = Field(64, ge=2, description="prompts sampled from the set, at most its size")
    responses_per_prompt: int = Field(
        4, ge=2, description="responses per prompt, from which states are taken"
    )
    quantiles: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(
        (0.0, 0.1, 0.25, 0.5, 0.75, 0.9),
        min_length=1,
        description="positions of states: share of the response before",
    )
    continuations: int = Field(
        8, ge=2, description="continuations of each state, whose mean return is its value"
    )
    bootstrap: int = Field(1000, ge=100, description="bootstrap draws of prompts for the intervals")
    steps: int = Field(
        10,
        ge=2,
        description=(
            "with critic.kind=regression: rollouts of batch.prompts_per_step x samples_per_prompt "
            "at fixed weights, each measured with coefficients of those before"
        ),
    )
    seed: int = Field(
        1, ge=0, lt=2**62, description="seed of prompts, responses, continuations and intervals"
    )


class ProbedRunConfig(TrainConfig):
    """A training config and the probes of its critic; `train` refuses the section critic_probes."""

    critic_probes: CriticProbesConfig = CriticProbesConfig()


class CriticPretrainingConfig(TrainConfig):
    """A training config whose critic alone is trained, on recorded responses."""

    @model_validator(mode="after")
    def _there_is_something_to_learn(self) -> Self:
        if not self.has_critic_model or not self.value_pretraining.records:
            raise ValueError(
                "pretrain-critic needs recorded responses (value_pretraining.from) and a critic "
                f"that is a model: estimator={self.algorithm.advantage.estimator}, "
                f"critic.kind={self.critic.kind}"
            )
        return self

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks of a replica of the critic: there is no actor."""
        return {"critic": self.critic.layout.model_size}
