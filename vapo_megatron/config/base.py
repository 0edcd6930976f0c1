"""The base of every config section, and the nearest right key to a wrong one."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import reduce
from itertools import product
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from vapo_megatron.errors import BadInput

_CONDITION = re.compile(r"(?P<key>[\w.]+)(?:(?P<sign>!=|=|>)(?P<values>.+))?")


class Section(BaseModel):
    """A typed part of the config: unknown keys are refused, values cannot change after validation.

    CONFLICTS names settings that do not go together: (settings, other settings, why and what to do), see refuse().
    """

    CONFLICTS: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, serialize_by_alias=True
    )

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

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        for settings, others, why in self.CONFLICTS:
            refuse(self, settings, others, why)
        return self


def refuse(section: Section, settings: str, others: str, why: str) -> None:
    """Raise ValueError where one of the settings holds together with one of the others, with their values and why.

    settings, others: conditions on dotted keys, parted by ", ": `key` (is set and not 0 or false), `key=a|b`, `key!=a`
    or `key>1`; those joined by " & " must hold together. others "": the settings alone are refused.
    """
    for setting, other in product(settings.split(", "), others.split(", ")):
        values = [_holding(section, condition) for condition in f"{setting} & {other}".split(" & ") if condition]
        if all(values):
            first, *rest = values
            raise ValueError(f"{first}{' with ' if rest else ''}{' and '.join(rest)}: {why}")


def _holding(section: Section, condition: str) -> str:
    """The key and value of a condition that holds, "" of one that does not."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None, condition
    key, sign, expected = match["key"], match["sign"], match["values"]
    value: Any = reduce(lambda part, name: None if part is None else getattr(part, name), key.split("."), section)
    shown = "null" if value is None else str(value).removesuffix(".0")
    shown = shown.lower() if isinstance(value, bool) else shown
    if sign is None:
        holds = bool(value)
    elif sign == ">":
        holds = value is not None and float(shown) > float(expected)
    else:
        holds = (shown in expected.split("|")) == (sign == "=")
    return "" if not holds else key if isinstance(value, Section) else f"{key}={shown}"


def _types_in(annotation: Any) -> set[Any]:
    """An annotation and those within it; int for a literal 1."""
    parts = get_args(annotation)
    return {annotation if isinstance(annotation, type) else type(annotation), *(t for p in parts for t in _types_in(p))}


def key_from_environment(variable: str | None, name: str, remedy: str) -> str | None:
    """The key in an environment variable, which the config key `name` names; None where it names none. Raises BadInput
    where the variable is not set, or empty; remedy: what to do then, after "export it, "."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise BadInput(f"{name}={variable}: the environment has no such variable: export it, {remedy}")
    return key


ENOUGH = 0.6  # likeness below which a suggestion would be a guess


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a section and of the sections within it, in their order; a section's own name included.

    Entries of lists and mappings of sections count without their index: `stages.name` for `stages: list[Stage]`.
    """
    keys: list[str] = []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        keys.append(prefix + name)
        for section in _sections_in(field.annotation):
            keys += (key for key in known_keys(section, f"{prefix}{name}.") if key not in keys)
    return keys


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key most like `key`, or None where none is like enough. The first of equals wins."""
    best = max(known, key=lambda candidate: _likeness(key, candidate), default=None)
    return best if best is not None and _likeness(key, best) >= ENOUGH else None


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    arguments = get_args(annotation)
    for argument in arguments[:1] if get_origin(annotation) is Annotated else arguments:
        yield from _sections_in(argument)


def _likeness(key: str, candidate: str) -> float:
    """1 for equal keys, 0 for keys without a letter in common; the last name weighs more than what precedes it."""
    parent, _, leaf = key.rpartition(".")
    candidate_parent, _, candidate_leaf = candidate.rpartition(".")
    alike = parent == candidate_parent or (not parent and leaf == candidate_leaf)  # a section left out
    parents = 1.0 if alike else SequenceMatcher(None, parent, candidate_parent).ratio()
    abbreviated = _abbreviates(leaf, candidate_leaf) or _abbreviates(candidate_leaf, leaf)
    return 0.6 * (0.95 if abbreviated else SequenceMatcher(None, leaf, candidate_leaf).ratio()) + 0.4 * parents


def _abbreviates(short: str, name: str) -> bool:
    """Whether `short` is made of initials of the words of `name`, the first included: lr of learning_rate, tp of
    tensor_model_parallel_size."""
    initials = "".join(word[0] for word in name.split("_") if word)
    rest = iter(initials)
    return 1 < len(short) < len(name) and short[0] == initials[:1] and all(letter in rest for letter in short)


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every value in which two nested mappings differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
