"""How the critic learns: its loss, and its pretraining on a fixed policy."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section

# VAPO's "50 steps", read as gradient steps; prompts that value pretraining is measured on.
DEFAULT_STEPS = 50
HELD_OUT_SHARE = 1 / 8
# Bins beyond low and beyond high: 4 widths of the Gaussian, so that a target at the edge is learnt
# exactly.
MARGIN_BINS = 3


class ValueLossConfig(Section):
    """The loss of the critic, a mean over the tokens of the mini-batch."""

    CONFLICTS = (
        ("squash!=none", "kind=hl_gauss", "its bins already bound the values, remove squash"),
    )

    kind: Literal["mse", "clipped", "hl_gauss"] = Field(
        "mse", description="(V - R)^2 / 2, PPO's clipped, or HL-Gauss"
    )
    clip: float = Field(
        0.2, gt=0, description="largest change from the old value, for kind=clipped"
    )
    bins: int = Field(
        51, ge=2 * MARGIN_BINS + 1, description="outputs of the value head, for kind=hl_gauss"
    )
    low: float = Field(-1.0, description="smallest possible return, for kind=hl_gauss and squash")
    high: float = Field(1.0, description="largest possible return, for kind=hl_gauss and squash")
    squash: Literal["none", "tanh", "arctan"] = Field(
        "none",
        description="function that bounds values to low..high; hl_gauss is bounded by its bins",
    )

    @property
    def outputs(self) -> int:
        """Outputs of the value head."""
        if self.kind == "hl_gauss":
            return self.bins
        return 1

    @property
    def has_bounds(self) -> bool:
        """Whether values are bounded."""
        return self.squash != "none" or self.kind == "hl_gauss"

    @property
    def support(self) -> tuple[float, float]:
        """Outer edges of the first and last bin, margins included (kind=hl_gauss)."""
        margin = MARGIN_BINS * (self.high - self.low) / (self.bins - 2 * MARGIN_BINS)
        return self.low - margin, self.high + margin

    @model_validator(mode="after")
    def _bins_span_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low={self.low} is not below high={self.high}: give the range of the returns"
            )
        return self


class ValuePretrainingConfig(Section):
    """The critic learns the returns of the fixed initial policy, before the first policy update."""

    enabled: bool = Field(True, description="false: skip value pretraining")
    records: tuple[str, ...] = Field(
        (),
        alias="from",
        description=(
            "recorded responses to learn from instead of new rollouts: directories of earlier "
            "runs, rollouts of verl, slime, prime-rl, verifiers or TRL, or files with rows of "
            "prompt, response and result (docs/critic.md)"
        ),
    )
    steps: int | None = Field(
        None,
        ge=1,
        description=(
            "gradient steps; none: 50, or as many as iterations (or from) and replay_epochs yield"
        ),
    )
    iterations: int | None = Field(
        None,
        ge=1,
        description=(
            "rollouts to record, each of a training step's size; none: as many as `steps` needs"
        ),
    )
    replay_epochs: int = Field(1, ge=1, description="passes over the recorded rollouts")
    minibatch_size: int = Field(512, ge=1, description="samples per gradient step")
    stop_explained_variance: float | None = Field(
        None,
        le=1,
        description="stop once explained variance is at least this, and stop_bias, if set, holds",
    )
    stop_bias: float | None = Field(
        None,
        gt=0,
        description=(
            "stop once |mean V - R| is at most this at 0, 25, 50, 75 and 95 % of the response"
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        for key, on in (
            ("enabled=false", not self.enabled),
            (f"iterations={self.iterations}", self.iterations),
        ):
            if self.records and on:
                raise ValueError(
                    f"from with {key}: recorded responses replace new rollouts; remove one of them"
                )
        return self

    @property
    def most_steps(self) -> int | None:
        """Largest number of gradient steps; None: as many as the recorded rollouts give."""
        bounded = self.steps is not None or self.iterations is not None or self.records
        if bounded:
            return self.steps
        return DEFAULT_STEPS

    def rollouts(self, samples: int) -> int:
        """Rollouts to record, each of this many samples; an eighth of the samples is held out."""
        if self.records:
            return 0
        if self.iterations is not None:
            return self.iterations
        responses = (self.steps or DEFAULT_STEPS) * self.minibatch_size
        return math.ceil(responses / (samples * (1 - HELD_OUT_SHARE) * self.replay_epochs))

    def updates(self, samples: int) -> int:
        """Upper bound of gradient steps, for rollouts of this many samples each; a lower bound with
        recorded ones."""
        if self.records:
            return self.steps or 1
        trained = self.rollouts(samples) * samples * (1 - HELD_OUT_SHARE) * self.replay_epochs
        steps = math.ceil(trained / self.minibatch_size)
        if self.most_steps is None:
            return steps
        return min(steps, self.most_steps)
