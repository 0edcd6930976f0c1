"""What a run does about updates that would harm it."""

from pydantic import Field

from vapo_megatron.config.base import Section


class SkippedUpdatesConfig(Section):
    """Which optimizer updates are skipped, and when the run goes back. NaN and infinity always are."""

    grad_norm_spike: float | None = Field(
        None, gt=1, description="skip where the gradient norm is above so many times its median; null: never"
    )
    loss_spike: float | None = Field(
        None, gt=1, description="skip where a part of the loss is above so many times its median size; null: never"
    )
    most_in_a_row: int | None = Field(
        10,
        ge=1,
        description="so many skipped updates of a model in a row: back to the last checkpoint, with other prompts "
        "(exit 75); null: never",
    )
    restarts: int = Field(2, ge=0, description="how often to go back to one checkpoint; after that the run fails")


class HangsConfig(Section):
    """When a phase that does not end is a hang: ranks then leave stacks under logs/ and start again, or end (75)."""

    enabled: bool = Field(True, description="whether anybody watches")
    floor_s: float = Field(1800.0, gt=0, description="least limit of a phase, and for a rank that says nothing")
    factor: float = Field(5.0, gt=1, description="limit: so many times the slowest of the phase so far")
    every_s: float = Field(5.0, gt=0, description="between two heartbeats of a rank")


class RobustnessConfig(Section):
    """What keeps a run from harm, and from standing still."""

    updates: SkippedUpdatesConfig = SkippedUpdatesConfig()
    hangs: HangsConfig = HangsConfig()
