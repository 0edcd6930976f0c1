"""Base class of config sections, conflicts between settings, and suggestions for unknown keys."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import product
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from vapo_megatron.errors import BadInput

# package.module:name of a function.
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_CONDITION = re.compile(r"(?P<key>[\w.]+)(?:(?P<sign>!=|=|>)(?P<values>.+))?")


class Section(BaseModel):
    """A typed, frozen part of the config; unknown keys are refused.

    CONFLICTS lists incompatible settings: (settings, other settings, reason and remedy), see
    refuse().
    """

    CONFLICTS: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults_of_place(cls, values: Any) -> Any:
        """Merges subsections into their default: critic.optimizer without lr keeps the critic's lr.

        Rejects YAML booleans for numeric fields (True == 1 in Python).
        """
        if not isinstance(values, Mapping):
            return values
        merged = dict(values)
        for name, field in cls.model_fields.items():
            value = values.get(name)
            types = _types_in(field.annotation)
            if isinstance(field.default, Section) and isinstance(value, Mapping):
                merged[name] = {**field.default.model_dump(exclude_unset=True), **value}
            elif isinstance(value, bool) and bool not in types and types & {int, float}:
                merged[name] = str(value).lower()
        return merged

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        for settings, others, why in self.CONFLICTS:
            refuse(self, settings, others, why)
        return self


def refuse(section: Section, settings: str, others: str, why: str) -> None:
    """Raise ValueError if one of the settings holds together with one of the others.

    settings, others: conditions on dotted keys, separated by ", ": `key` (set, not 0 or false),
        `key=a|b`, `key!=a` or `key>1`; conditions joined by " & " must hold together. others "":
        the settings alone are refused.
    why: reason and remedy, appended to the keys and values.
    """
    for setting, other in product(settings.split(", "), others.split(", ")):
        values = [
            _holding(section, condition)
            for condition in f"{setting} & {other}".split(" & ")
            if condition
        ]
        if all(values):
            first, *rest = values
            if rest:
                combination = f"{first} with {' and '.join(rest)}"
            else:
                combination = first
            raise ValueError(f"{combination}: {why}")


def _holding(section: Section, condition: str) -> str:
    """Returns the key and value of a condition that holds, otherwise ""."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None, condition
    key = match["key"]
    value: Any = section
    for name in key.split("."):
        if value is not None:
            value = getattr(value, name)
    shown = _as_yaml(value)
    sign = match["sign"]
    if sign is None:
        holds = bool(value)
    elif sign == ">":
        holds = value is not None and float(shown) > float(match["values"])
    else:
        holds = (shown in match["values"].split("|")) == (sign == "=")
    if not holds:
        return ""
    if isinstance(value, Section):
        return key
    return f"{key}={shown}"


def _as_yaml(value: Any) -> str:
    """A value as in a config file; whole numbers without a decimal point."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0")


def _types_in(annotation: Any) -> set[Any]:
    """The types in an annotation; a literal counts as its type (1: int)."""
    types = {annotation if isinstance(annotation, type) else type(annotation)}
    for part in get_args(annotation):
        types |= _types_in(part)
    return types


def key_from_environment(variable: str | None, name: str, remedy: str) -> str | None:
    """Returns the secret in the environment variable that the config key `name` names.

    variable: None: no secret is used, returns None.
    remedy: alternative to exporting the variable, for the error message.

    Raises:
        BadInput: the variable is not set, or empty.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BadInput(
            f"{name}={variable}: the environment has no such variable: export it, {remedy}"
        )
    return key


ENOUGH = 0.6  # below this likeness a suggestion would be a guess


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Lists every dotted key of a section and its subsections, in order; sections included.

    Entries of lists and mappings have no index: `stages.name` for `stages: list[Stage]`.
    """
    keys: list[str] = []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        keys.append(prefix + name)
        for section in _sections_in(field.annotation):
            keys += (key for key in known_keys(section, f"{prefix}{name}.") if key not in keys)
    return keys


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Returns the most similar known key, or None if none is similar enough; ties: the first."""
    best = max(known, key=lambda candidate: _likeness(key, candidate), default=None)
    if best is None or _likeness(key, best) < ENOUGH:
        return None
    return best


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _likeness(key: str, candidate: str) -> float:
    """Similarity of two keys from 0 to 1; the last name weighs more than its section."""
    parent, _, leaf = key.rpartition(".")
    candidate_parent, _, candidate_leaf = candidate.rpartition(".")
    section_left_out = not parent and leaf == candidate_leaf
    if parent == candidate_parent or section_left_out:
        parents = 1.0
    else:
        parents = SequenceMatcher(None, parent, candidate_parent).ratio()
    if _abbreviates(leaf, candidate_leaf) or _abbreviates(candidate_leaf, leaf):
        leaves = 0.95
    else:
        leaves = SequenceMatcher(None, leaf, candidate_leaf).ratio()
    return 0.6 * leaves + 0.4 * parents


def _abbreviates(short: str, name: str) -> bool:
    """Whether `short` consists of word initials of `name`, including the first.

    Such as lr of learning_rate, and tp of tensor_model_parallel_size.
    """
    initials = [word[0] for word in name.split("_") if word]
    rest = iter(initials)
    return len(short) > 1 and initials[:1] == [short[0]] and all(letter in rest for letter in short)


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old value, new value) of every difference of two nested mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            inner = f"{key}.{name}" if key else name
            yield from differences(old.get(name), new.get(name), inner)
    elif old != new:
        yield key, old, new
