"""The suggestion is the key that was meant."""

from typing import Annotated

import pytest
from pydantic import Field

from vapo_megatron.config.base import Section, known_keys, nearest


class Inner(Section):
    lr: float = 0.0
    tensor_parallel: int = 1


class Aliased(Section):
    lr: float = 0.0
    records: int = Field(0, alias="from")


class Outer(Section):
    first: Inner = Inner()
    maybe: Inner | None = None
    many: dict[str, Inner] = Field(default_factory=dict)
    either: Annotated[Inner | Aliased, Field(description="one of both")] = Inner()
    pair: tuple[int, str] = (1, "")
    tensor_parallels: int = 1


def test_known_keys_go_through_every_kind_of_nesting() -> None:
    assert known_keys(Outer) == [
        "first",
        "first.lr",
        "first.tensor_parallel",
        "maybe",
        "maybe.lr",
        "maybe.tensor_parallel",
        "many",
        "many.lr",
        "many.tensor_parallel",
        "either",
        "either.lr",
        "either.tensor_parallel",
        "either.from",
        "pair",
        "tensor_parallels",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("first.learning_rate", "first.lr"),
        ("first.tp", "first.tensor_parallel"),
        ("maybe.tensor_paralel", "maybe.tensor_parallel"),
        ("lr", "first.lr"),
        ("frist.lr", "first.lr"),
        ("mabye.lr", "maybe.lr"),
        ("first.t", None),
        ("first.pt", None),
        ("first.qqq", None),
        ("qqq.lrx", None),
        ("maybe.large_language_rate", "maybe.lr"),
        ("something.else", None),
        ("tensor_parallel", "first.tensor_parallel"),
    ],
)
def test_nearest(key: str, meant: str | None) -> None:
    assert nearest(key, known_keys(Outer)) == meant


@pytest.mark.parametrize(
    ("key", "known", "meant"),
    [
        ("a.tp", ["a.tensor_parallel", "a.tp"], "a.tp"),
        ("a.b.lr", ["a.c.lr", "a.b.lr"], "a.b.lr"),
        ("abc.lr", ["xyz.lr", "uvw.lr"], "xyz.lr"),  # the least likeness that is enough
        ("abc.lr", ["xyz.lrs"], None),
        ("tensor__parallel", ["tp"], "tp"),
        ("tp", ["t", "tensor__parallel"], "tensor__parallel"),
    ],
)
def test_the_last_name_weighs_more_than_the_section(
    key: str, known: list[str], meant: str | None
) -> None:
    assert nearest(key, known) == meant


def test_nearest_of_nothing_is_nothing() -> None:
    assert nearest("a", []) is None
