"""How the critic learns: its loss, and its pretraining on a policy that stands still."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section

# VAPO's "50 steps", read as gradient steps; prompts that value pretraining is measured on.
DEFAULT_STEPS, HELD_OUT_SHARE = 50, 1 / 8
# Bins beyond low and beyond high: with 4 widths of the Gaussian a target at the edge is learnt as it is.
MARGIN_BINS = 3


class ValueLossConfig(Section):
    """The loss of the critic, a mean over the tokens of the mini-batch."""

    CONFLICTS = (("squash!=none", "kind=hl_gauss", "its bins bound the values already, remove squash"),)

    kind: Literal["mse", "clipped", "hl_gauss"] = Field("mse", description="(V - R)^2 / 2, PPO's clipped one, HL-Gauss")
    clip: float = Field(0.2, gt=0, description="how far a value may move from the old one, kind=clipped")
    bins: int = Field(51, ge=2 * MARGIN_BINS + 1, description="outputs of the value head, kind=hl_gauss")
    low: float = Field(-1.0, description="least return, for kind=hl_gauss and squash")
    high: float = Field(1.0, description="greatest return, for kind=hl_gauss and squash")
    squash: Literal["none", "tanh", "arctan"] = Field(
        "none", description="what bounds values to low..high; the bins of hl_gauss have bounds of their own"
    )

    @property
    def outputs(self) -> int:
        """Outputs of the value head."""
        return self.bins if self.kind == "hl_gauss" else 1

    @property
    def has_bounds(self) -> bool:
        """Whether no value can leave a range."""
        return self.squash != "none" or self.kind == "hl_gauss"

    @property
    def support(self) -> tuple[float, float]:
        """From the outer edge of the first bin to that of the last, margins included (kind=hl_gauss)."""
        margin = MARGIN_BINS * (self.high - self.low) / (self.bins - 2 * MARGIN_BINS)
        return self.low - margin, self.high + margin

    @model_validator(mode="after")
    def _bins_span_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} is not below high={self.high}: give the range of the returns")
        return self


class ValuePretrainingConfig(Section):
    """The critic learns the returns of a policy that stands still, before the first policy update."""

    enabled: bool = Field(True, description="false: the critic starts as it is")
    records: tuple[str, ...] = Field(
        (),
        alias="from",
        description="recorded responses instead of fresh rollouts: earlier runs' directories, files or folders of "
        "verl's or slime's rollout dumps, or of rows with prompt, response and result (docs/critic.md)",
    )
    steps: int | None = Field(
        None, ge=1, description="gradient steps; none: 50, or as many as iterations (or from) and replay_epochs give"
    )
    iterations: int | None = Field(
        None,
        ge=1,
        description="rollouts recorded, each of a step's size; none: as many as steps takes of fresh ones",
    )
    replay_epochs: int = Field(1, ge=1, description="passes over the recorded rollouts; 1: each response is read once")
    minibatch_size: int = Field(512, ge=1, description="samples")
    stop_explained_variance: float | None = Field(
        None, le=1, description="stop where the explained variance is at least this and the bias small enough"
    )
    stop_bias: float | None = Field(
        None, gt=0, description="stop where |mean V - R| is at most this at 0, 25, 50, 75 and 95 % of the response"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        for key, on in (("enabled=false", not self.enabled), (f"iterations={self.iterations}", self.iterations)):
            if self.records and on:
                raise ValueError(f"from with {key}: what is recorded is learnt from, and nothing drawn; remove one")
        return self

    @property
    def most_steps(self) -> int | None:
        """Gradient steps at most; None: what the recorded rollouts give."""
        bounded = self.steps is not None or self.iterations is not None or self.records
        return self.steps if bounded else DEFAULT_STEPS

    def rollouts(self, samples: int) -> int:
        """Rollouts to record, each of so many samples. Of those an eighth is held out."""
        if self.records:
            return 0
        if self.iterations is not None:
            return self.iterations
        responses = (self.steps or DEFAULT_STEPS) * self.minibatch_size
        return math.ceil(responses / (samples * (1 - HELD_OUT_SHARE) * self.replay_epochs))

    def updates(self, samples: int) -> int:
        """Gradient steps on rollouts of so many samples each, at most; at least, where they are recorded already."""
        if self.records:
            return self.steps or 1
        trained = self.rollouts(samples) * samples * (1 - HELD_OUT_SHARE) * self.replay_epochs
        steps = math.ceil(trained / self.minibatch_size)
        return steps if self.most_steps is None else min(steps, self.most_steps)
