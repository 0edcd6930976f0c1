"""The suggestion is the key that was meant."""

import pytest
from pydantic import Field

from vapo_megatron.config.base import Section, known_keys, nearest


class Inner(Section):
    lr: float = 0.0
    tensor_parallel: int = 1


class Outer(Section):
    first: Inner = Inner()
    maybe: Inner | None = None
    many: dict[str, Inner] = Field(default_factory=dict)
    pair: tuple[int, str] = (1, "")
    tensor_parallels: int = 1


def test_known_keys_go_through_every_kind_of_nesting() -> None:
    assert known_keys(Outer) == [
        *("first", "first.lr", "first.tensor_parallel"),
        *("maybe", "maybe.lr", "maybe.tensor_parallel"),
        *("many", "many.lr", "many.tensor_parallel"),
        *("pair", "tensor_parallels"),
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("first.learning_rate", "first.lr"),
        ("first.tp", "first.tensor_parallel"),
        ("maybe.tensor_paralel", "maybe.tensor_parallel"),
        ("lr", "first.lr"),
        ("frist.lr", "first.lr"),
        ("something.else", None),
        ("tensor_parallel", "first.tensor_parallel"),
    ],
)
def test_nearest(key: str, meant: str | None) -> None:
    assert nearest(key, known_keys(Outer)) == meant


def test_nearest_of_nothing_is_nothing() -> None:
    assert nearest("a", []) is None
