"""Rows of choices in which any two choices of different switches meet at least once, if they
go together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Choice = tuple[str, str]  # a switch, and one of its choices
Pair = tuple[Choice, Choice]
Row = dict[str, str]
Choices = Mapping[str, Sequence[str]]


def pairs_of(row: Row) -> set[Pair]:
    """All pairs of choices in a row, in the row's order of switches."""
    return set(combinations(row.items(), 2))


def every_pair(choices: Choices) -> Iterator[Pair]:
    """All pairs of choices of two switches, the switches with the most choices first."""
    ordered = sorted(
        combinations(choices, 2), key=lambda names: -len(choices[names[0]]) * len(choices[names[1]])
    )
    for first, second in ordered:
        yield from (
            ((first, one), (second, other)) for one in choices[first] for other in choices[second]
        )


def pairwise_rows(choices: Choices, fits: Callable[[Row], bool]) -> tuple[list[Row], set[Pair]]:
    """A greedy set of rows, each with one choice of every switch.

    Args:
        choices: by switch; the first ones fit together, and each other one fits beside them or with
            one of them changed.
        fits: whether a row may be used.

    Returns:
        The rows, and the pairs that are in none because they do not fit.
    """
    rows: list[Row] = []
    met: set[Pair] = set()
    refused: set[Pair] = set()
    firsts = {switch: first for switch, (first, *_) in choices.items()}
    helpers = {
        choice: _helpers(choice, firsts, choices, fits)
        for switch in choices
        for choice in _of(switch, choices)
    }
    for pair in every_pair(choices):
        if pair in met:
            continue
        starts = (
            dict(helper) | dict(pair) for helper in product(*(helpers[choice] for choice in pair))
        )
        decided = next((start for start in starts if fits(firsts | start)), None)
        if decided is None:
            refused.add(pair)
            continue
        row = firsts | decided
        for switch in choices:
            if switch not in decided:
                row = _best(row, switch, decided, met, choices, fits)
                decided[switch] = row[switch]
        rows.append(row)
        met |= pairs_of(row)
    return rows, refused


def _of(switch: str, choices: Choices) -> list[Choice]:
    return [(switch, choice) for choice in choices[switch]]


def _helpers(
    choice: Choice, firsts: Row, choices: Choices, fits: Callable[[Row], bool]
) -> list[Choice]:
    """What a choice needs beside the first ones: itself if nothing more, else each choice with
    which it fits."""
    row = firsts | dict([choice])
    if fits(row):
        return [choice]
    others = [other for switch in choices if switch != choice[0] for other in _of(switch, choices)]
    return [other for other in others if fits(row | dict([other]))]


def _best(
    row: Row,
    switch: str,
    decided: Row,
    met: set[Pair],
    choices: Choices,
    fits: Callable[[Row], bool],
) -> Row:
    """The row with the choice of a switch that brings the most new pairs with the chosen ones."""
    options = [row | {switch: choice} for choice in choices[switch]]
    options.sort(key=lambda option: -_new_pairs(option, switch, decided, met))
    return next(option for option in options if option == row or fits(option))


def _new_pairs(row: Row, switch: str, decided: Row, met: set[Pair]) -> int:
    """How many pairs of a switch's choice with those decided before are in no row yet."""
    known = {name: choice for name, choice in row.items() if name in decided or name == switch}
    return sum((switch, row[switch]) in pair and pair not in met for pair in pairs_of(known))
