"""The base of every config section."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from vapo_megatron.errors import BadInput


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


def key_from_environment(variable: str | None, name: str, remedy: str) -> str | None:
    """The key in an environment variable; None where no variable is named.

    Args:
        variable: its name, the value of the config key `name`.
        name: of the config key, for the message.
        remedy: what to do where it is not set, after "export it, ".

    Raises:
        BadInput: the variable is not set, or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BadInput(f"{name}={variable}: the environment has no such variable: export it, {remedy}")
    return key
