"""Which conditions of a conflict hold, and how a refusal shows them."""

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from vapo_megatron.config.base import Section, refuse


class Inner(Section):
    size: int | None = None
    share: float = 1.0
    names: tuple[str, ...] = ()


class Outer(Section):
    inner: Inner = Inner()
    other: Inner | None = None
    on: bool = False
    kind: Literal["a", "b", "c"] = "a"


def told(values: dict[str, Any], settings: str, others: str) -> str:
    try:
        refuse(Outer.model_validate(values), settings, others, "choose")
    except ValueError as error:
        return str(error)
    return ""


ON = {"on": True}


@pytest.mark.parametrize(
    ("values", "settings", "line"),
    [
        ({}, "on", ""),
        (ON, "on", "on=true: choose"),
        ({}, "on=false", "on=false: choose"),
        ({}, "on!=true", "on=false: choose"),
        (ON, "on!=true", ""),
        ({}, "inner.size", ""),
        ({"inner": {"size": 0}}, "inner.size", ""),
        ({"inner": {"size": 3}}, "inner.size", "inner.size=3: choose"),
        ({}, "inner.size=null", "inner.size=null: choose"),
        ({"inner": {"size": 3}}, "inner.size=null", ""),
        ({}, "inner.share=1", "inner.share=1: choose"),
        ({"inner": {"share": 0.5}}, "inner.share!=1", "inner.share=0.5: choose"),
        ({}, "inner.share!=1", ""),
        ({"inner": {"share": 1.5}}, "inner.share>1", "inner.share=1.5: choose"),
        ({}, "inner.share>1", ""),
        ({}, "inner.size>1", ""),
        ({"inner": {"size": 2}}, "inner.size>1", "inner.size=2: choose"),
        ({"inner": {"names": ["x"]}}, "inner.names", "inner.names=('x',): choose"),
        ({}, "other", ""),
        ({"other": {}}, "other", "other: choose"),
        ({}, "other.size", ""),
        ({}, "other.size=null", "other.size=null: choose"),
        ({"other": {"size": 4}}, "other.size", "other.size=4: choose"),
        ({}, "kind=b|c", ""),
        ({"kind": "c"}, "kind=b|c", "kind=c: choose"),
        ({"kind": "b"}, "kind=b|c", "kind=b: choose"),
        ({}, "kind!=b|c", "kind=a: choose"),
        ({"kind": "b"}, "kind!=b|c", ""),
        ({"kind": "b"}, "on, kind=b", "kind=b: choose"),
        (ON | {"kind": "b"}, "on, kind=b", "on=true: choose"),
        ({"kind": "b"}, "on & kind=b", ""),
        (ON | {"kind": "b"}, "on & kind=b", "on=true with kind=b: choose"),
    ],
)
def test_a_condition_holds_or_not(values: dict[str, Any], settings: str, line: str) -> None:
    assert told(values, settings, "") == line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, ""),
        (ON, ""),
        ({"kind": "c"}, ""),
        (ON | {"kind": "c"}, "on=true with kind=c: choose"),
        (ON | {"kind": "b"}, ""),
        (
            ON | {"kind": "b", "inner": {"size": 2}},
            "on=true with kind=b and inner.size=2: choose",
        ),
        ({"other": {}, "kind": "c"}, "other with kind=c: choose"),
    ],
)
def test_any_setting_goes_with_none_of_the_others(values: dict[str, Any], line: str) -> None:
    assert told(values, "on, other", "kind=c, kind=b & inner.size") == line


class Counts(Section):
    whole: int = 1
    maybe: int | None = None
    chosen: Literal[1, 2] = 1
    rate: float | Literal["auto"] = "auto"
    either: bool | int = 1
    text: str = ""


@pytest.mark.parametrize("key", ["whole", "maybe", "chosen", "rate"])
def test_a_yaml_boolean_is_no_number(key: str) -> None:
    """True is 1 in Python: `samples_per_prompt: yes` would be taken."""
    for value in (True, False):
        with pytest.raises(ValidationError, match=f"input_value='{str(value).lower()}'"):
            Counts.model_validate({key: value})
    assert Counts.model_validate({"either": True}).either is True
    with pytest.raises(ValidationError, match="input_value=True"):
        Counts.model_validate({"text": True})


def test_a_section_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValidationError, match="valid dictionary or instance of Inner"):
        Outer.model_validate({"inner": 3})
    assert Outer.model_validate(Outer(on=True)).on
