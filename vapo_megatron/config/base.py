"""The base of every config section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A typed part of the config: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
