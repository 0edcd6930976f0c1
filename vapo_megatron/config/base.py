"""The base of every config section."""

import os
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from vapo_megatron.errors import BadInput


class Section(BaseModel):
    """A typed part of the config: unknown keys are refused, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_it_is_meant(cls, values: Any) -> Any:
        """A section within lies over the default of its place: critic.optimizer without lr has the critic's. YAML's
        true (or yes, on) is no number, though it is 1 to Python."""
        if not isinstance(values, Mapping):
            return values
        merged = dict(values)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, Section) and isinstance(values.get(name), Mapping):
                merged[name] = {**field.default.model_dump(exclude_unset=True), **values[name]}
            elif isinstance(values.get(name), bool) and bool not in (types := _types_in(field.annotation)):
                merged[name] = str(values[name]).lower() if types & {int, float} else values[name]
        return merged


def _types_in(annotation: Any) -> set[Any]:
    """An annotation and those within it; int for a literal 1."""
    parts = get_args(annotation)
    return {annotation if isinstance(annotation, type) else type(annotation), *(t for p in parts for t in _types_in(p))}


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
