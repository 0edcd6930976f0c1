"""The base of every config section."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A typed part of the config: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _sections_given_in_part(cls, values: Any) -> Any:
        """A section within lies over the default of its place: critic.optimizer without lr has the critic's."""
        if not isinstance(values, Mapping):
            return values
        merged = dict(values)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section) and isinstance(values.get(name), Mapping):
                merged[name] = {**field.default.model_dump(exclude_unset=True), **values[name]}
        return merged
