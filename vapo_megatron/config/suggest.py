"""The known key that a mistyped one was meant to be."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

# Shares of the last name and of what precedes it in the likeness of two dotted keys, and the likeness below which
# a suggestion would be a guess.
LEAF_SHARE = 0.6
PARENT_SHARE = 0.4
ENOUGH = 0.6


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a section and of the sections within it, in their order; a section's own name included.

    Entries of lists and mappings of sections count without their index: `stages.name` for `stages: list[Stage]`.
    """
    keys: list[str] = []
    for name, field in model.model_fields.items():
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
    """1 for equal keys, 0 for keys without a letter in common."""
    parent, _, leaf = key.rpartition(".")
    candidate_parent, _, candidate_leaf = candidate.rpartition(".")
    alike = parent == candidate_parent or (not parent and leaf == candidate_leaf)  # a section left out
    parents = 1.0 if alike else SequenceMatcher(None, parent, candidate_parent).ratio()
    return LEAF_SHARE * _leaf_likeness(leaf, candidate_leaf) + PARENT_SHARE * parents


def _leaf_likeness(leaf: str, candidate: str) -> float:
    if leaf == candidate:
        return 1.0
    if _abbreviates(leaf, candidate) or _abbreviates(candidate, leaf):
        return 0.95
    return SequenceMatcher(None, leaf, candidate).ratio()


def _abbreviates(short: str, name: str) -> bool:
    """Whether `short` is made of initials of the words of `name`, the first included: lr of learning_rate, tp of
    tensor_model_parallel_size."""
    initials = "".join(word[0] for word in name.split("_") if word)
    if len(short) < 2 or short[0] != initials[:1]:
        return False
    rest = iter(initials)
    return all(letter in rest for letter in short)
