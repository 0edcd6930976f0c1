"""One-line explanations of config errors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vapo_megatron.config.base import IMPORT_PATH, known_keys, nearest

# For each trainer, its keys and their names here.
OTHER_TRAINERS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("other_trainers.yaml").read_text()
)
_OURS = {key: ours for keys in OTHER_TRAINERS.values() for key, ours in keys.items()}


def named_here(key: str) -> str | None:
    """Returns a hint for a key of another trainer, such as its name here; None for other keys."""
    parts = key.split(".")
    name = parts[-1]
    last_two = ".".join(parts[-2:])
    if "lora" in parts or name.startswith("lora_"):
        return (
            "here adapters are model.adapter, trained with actor.kind=adapter or "
            "critic.kind=adapter: docs/lora.md"
        )
    if name == "val_only":
        return "evaluation alone is a command: vapo-megatron evaluate CONFIG --checkpoint final"
    if (ours := _OURS.get(last_two) or _OURS.get(name)) is not None:
        return f"here it is {ours}"
    if key.partition(".")[0] in ("actor_rollout_ref", "trainer"):
        return "it looks like one of verl's: docs/configuration.md has the names here"
    return None


LONGEST_VALUE = 60
# More unknown or missing keys than this suggest the config of another command, not typos.
_MISSPELT = 3


def explain(
    error: ValidationError,
    model: type[BaseModel],
    values: Any,
    source: str,
    overridden: Sequence[str] = (),
) -> str:
    """Returns one line with the first error, and the number of further errors.

    error: of validating `values` as `model`.
    source: file that the values come from.
    overridden: dotted keys that come from the command line instead.
    """
    # A union reports one error for each of its members; together they are one mistake.
    mistakes: dict[str, list[ErrorDetails]] = {}
    for details in error.errors():
        mistakes.setdefault(_dotted(details, values), []).append(details)
    # Where one of the members is a section or mapping, its mistakes are the ones that are meant.
    outer = {key for key in mistakes if any(other.startswith(f"{key}.") for other in mistakes)}
    for key in outer:
        del mistakes[key]
    key, first = next(iter(mistakes.items()))
    if key:
        is_override = any(_covers(key, override) for override in overridden)
    else:
        told = first[0]["msg"]
        is_override = any(f"{name}=" in told or f", {name}: " in told for name in overridden)
    origin = "override" if is_override else source
    message = f"{origin}: {' '.join(_sentence(key, first, model).split())}"
    if len(mistakes) == 1:
        return message
    strange = sum(
        errors[0]["type"] in ("extra_forbidden", "missing") for errors in mistakes.values()
    )
    more = f"and {len(mistakes) - 1} more"
    if strange > _MISSPELT and not is_override:
        more += ": is it the config of another command?"
        if model.__name__ == "EvaluateConfig":
            more += " A training run's needs --checkpoint final"
    return f"{message} ({more})"


def _sentence(key: str, errors: Sequence[ErrorDetails], model: type[BaseModel]) -> str:
    first = errors[0]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        known = known_keys(model)
        if first["loc"][-1] == key and key in known:
            # A dotted key in a file
            *sections, name = key.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{name}: ..."
            return f"unknown key {key}: in a file write it nested, {nested}{'}' * len(sections)}"
        return f"unknown key {key}; {_hint(key, known)}"
    if first["type"] == "missing":
        return f"missing key {key}: give it a value"
    if first["type"] == "value_error":
        sentence = first["msg"].partition(", ")[2]
        if key:
            return f"{key}: {sentence}"
        return sentence
    expected = dict.fromkeys(_expectation(details) for details in errors)
    value = repr(first["input"])
    if len(value) > LONGEST_VALUE:
        value = value[:LONGEST_VALUE] + "..."
    return f"{key} is {value}; expected {' or '.join(expected)}"


def _expectation(details: ErrorDetails) -> str:
    kinds = {"path_type": "path", "string_type": "text"}
    if details["type"] in kinds:
        return f"a {kinds[details['type']]} (quote it: key='\"...\"' on a command line)"
    if details["type"] == "int_parsing_size":
        return "a smaller integer"
    if details["type"] == "model_type":
        return "a section of keys"
    if details["type"] == "tuple_type":
        return "a list"
    if details["type"] == "too_short":
        return f"a list of at least {details['ctx']['min_length']}"
    if details["type"] == "string_pattern_mismatch" and details["ctx"]["pattern"] == IMPORT_PATH:
        return "package.module:name, with a colon"
    if details["type"] == "string_pattern_mismatch":
        return f"a text that matches {details['ctx']['pattern']}"
    return details["msg"].removeprefix("Input should be ").partition(", unable to ")[0]


def _hint(key: str, known: Sequence[str]) -> str:
    if (head := key.partition(".")[0]) in (
        "hardware",
        "plan",
        "critic_probes",
    ) and head not in known:
        return (
            "it belongs to `vapo-megatron plan`, `doctor` or `critic`: give it there, or in a "
            "YAML that extends this"
        )
    if (elsewhere := named_here(key)) is not None:
        return elsewhere
    guess = nearest(key, known)
    if guess is not None:
        return f"did you mean {guess}?"
    section = key.rpartition(".")[0]
    while section and section not in known:
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    names = [
        name.removeprefix(prefix)
        for name in known
        if name.startswith(prefix) and "." not in name[len(prefix) :]
    ]
    if section:
        place = f"of {section}"
    else:
        place = "at the top"
    return f"known keys {place}: {', '.join(names)}"


def _dotted(details: ErrorDetails, values: Any) -> str:
    """Returns the user's key for pydantic's location, which also names the union members tried."""
    parts: list[str] = []
    last = len(details["loc"]) - 1
    for depth, part in enumerate(details["loc"]):
        is_entry = isinstance(values, list) and isinstance(part, int)
        if is_entry or (isinstance(values, Mapping) and part in values):
            values = values[part]
        elif not (depth == last and details["type"] == "missing"):
            continue
        parts.append(str(part))
    if details["type"] == "extra_forbidden":
        # A mistyped section is reported as a whole: follow it to its key if it has only one.
        while isinstance(values, Mapping) and len(values) == 1:
            name, values = next(iter(values.items()))
            parts.append(str(name))
    return ".".join(parts)


def _covers(key: str, given: str) -> bool:
    return key == given or key.startswith(given + ".") or given.startswith(key + ".")
