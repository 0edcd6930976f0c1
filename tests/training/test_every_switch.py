"""Every choice of a switch that test_step_switches.py knows is trained with."""

from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from test_step_switches import CASES, CUTS

from vapo_megatron.config.train import TrainConfig


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections among the types that a field may have."""
    found = [annotation, *get_args(annotation)]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]


def keys_of(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """Every key below a section by its dotted name, with its type."""
    for name, field in section.model_fields.items():
        below = sections_in(field.annotation)
        if below:
            yield from keys_of(below[0], f"{prefix}.{name}")
        else:
            yield f"{prefix}.{field.alias or name}", field.annotation


KEYS = dict(
    key
    for name in ("algorithm", "value_pretraining", "critic")
    for key in keys_of(sections_in(TrainConfig.model_fields[name].annotation)[0], name)
)


def choices(annotation: Any) -> set[Any]:
    """The values that a type names one by one."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if annotation is bool:
        return {True, False}
    return (
        set().union(*(choices(kind) for kind in get_args(annotation)))
        if get_origin(annotation) is Union
        else set()
    )


# Choices that are defaults of other cases, or that have a separate test.
TAKEN_ELSEWHERE: dict[str, set[Any]] = {
    "algorithm.value_loss.squash": {"none"},
    "algorithm.policy_loss.kind": {"function"},  # test_doors.py
}


@pytest.mark.parametrize("key", sorted({case.key for case in CASES}))
def test_every_choice_of_a_switch_is_taken_once(key: str) -> None:
    wanted = choices(KEYS[key])
    taken = {case.value for case in CASES if case.key == key}
    missing = wanted - taken - TAKEN_ELSEWHERE.get(key, set())
    assert not missing, (
        f"{key}: no test trains with {missing}. Add a Case to CASES in "
        "tests/training/test_step_switches.py, and the formula to tests/training/switch_formulas.py"
    )


def test_cuts_take_every_choice() -> None:
    units = {
        switches.get("algorithm.update.minibatch_unit", "samples") for switches, *_ in CUTS.values()
    }
    assert choices(KEYS["algorithm.update.minibatch_unit"]) == units
