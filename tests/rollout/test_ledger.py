"""What is drawn, trained and dropped, whatever the order in which groups come back."""

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from vapo_megatron.rollout.ledger import BROKEN, DROPPED, FILLED, NO_SIGNAL, STALE, Ledger, StepRule


def every(n: int) -> Callable[[int], bool]:
    return lambda number: number % n == 0


def check_against_a_restored_one(ledger: Ledger, graded: dict[int, bool | None]) -> None:
    """What is kept up to date as groups come and go is what follows from the groups alone."""
    state = json.loads(json.dumps(ledger.state()))
    restored = Ledger(ledger.rule, ledger.first)
    restored.trained = ledger.trained
    restored.taken = ledger.taken
    restored.restore(state, graded)
    assert (ledger.room(), ledger.in_flight, ledger.is_ready()) == (
        restored.room(),
        restored.in_flight,
        restored.is_ready(),
    )
    assert copy.deepcopy(ledger).surplus() == restored.surplus()


def play(
    rule: StepRule, useful: Callable[[int], bool | None], seed: int
) -> tuple[list[list[int]], Ledger, list[int]]:
    """Draw, grade in a random order, take and train at random times; what each step trained, and
    ages when drawn."""
    chance = random.Random(seed)
    ledger = Ledger(rule)
    flying: dict[int, int] = {}
    steps: list[list[int]] = []
    ages: list[int] = []
    drawn_at: dict[int, int] = {}
    while len(steps) < rule.steps:
        for _ in range(ledger.room()):
            number = ledger.draw()
            assert number not in flying, "in flight twice"
            flying[number] = drawn_at[number] = ledger.trained
        if flying and chance.random() < 0.8:
            number = chance.choice(sorted(flying))
            del flying[number]
            ledger.grade(number, useful(number))
            for gone in ledger.surplus():
                flying.pop(gone, None)
        elif ledger.is_ready() and (ledger.taken == ledger.trained or not rule.staleness):
            steps.append(ledger.take())
            ages += [ledger.taken - 1 - drawn_at[number] for number in steps[-1]]
            for gone in ledger.surplus():
                flying.pop(gone, None)
            if not rule.staleness:
                assert rule.any_order or (not flying and not ledger.room()), (
                    "nothing is in flight at the end of a synchronous step"
                )
                ledger.advance()
        elif ledger.taken > ledger.trained:
            ledger.advance()
        graded = {
            number: useful(number)
            for number in drawn_at
            if number in ledger and number not in flying
        }
        check_against_a_restored_one(ledger, graded)
        in_all = ledger.counts["trained"] + sum(ledger.counts[why] for why in DROPPED)
        assert ledger.counts["drawn"] == in_all + ledger.in_flight + ledger.graded, (
            "a group is lost or counted twice"
        )
        assert ledger.in_flight == len(flying)
    return steps, ledger, ages


@pytest.mark.parametrize("seed", range(20))
def test_step_trains_the_first_useful_groups_in_the_order_drawn(seed: int) -> None:
    steps, ledger, _ = play(StepRule(4, 5, oversampling=2.0, most_draws=40), every(3), seed)
    assert steps == [[12 * step + 3 * place for place in range(4)] for step in range(5)]
    assert ledger.counts[NO_SIGNAL] == 2 * 19 and ledger.first == 58, (
        "the next one would begin behind the last trained"
    )


@pytest.mark.parametrize("seed", range(5))
def test_after_the_most_draws_others_fill_the_step(seed: int) -> None:
    steps, ledger, _ = play(StepRule(3, 2, oversampling=3.0, most_draws=5), every(4), seed)
    assert steps == [[0, 4, 1], [8, 5, 6]] and ledger.first == 10


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_broken_groups_are_neither_trained_nor_counted_as_drawn(staleness: int, seed: int) -> None:
    """Groups 1, 4, 7, ... break. Of the whole ones 0, 6, 12, ... have signal, and those between
    them fill a step."""

    def useful(number: int) -> bool | None:
        return None if number % 3 == 1 else number % 6 == 0

    steps, ledger, _ = play(StepRule(3, 4, 2.0, 4, staleness), useful, seed)
    if not staleness:  # 0, 2, 3 and 5 are the four of the first step
        assert steps == [[0, 2, 3], [6, 8, 9], [12, 14, 15], [18, 20, 21]]
        assert (ledger.counts[BROKEN], ledger.counts[NO_SIGNAL], ledger.counts[FILLED]) == (8, 4, 8)
    trained = [number for step in steps for number in step]
    assert (
        len(trained) == 12
        and all(useful(number) is not None for number in trained)
        and ledger.counts[BROKEN]
    )
    steps, ledger, _ = play(
        StepRule(3, 4, staleness=staleness), lambda n: None if n % 3 == 1 else True, seed
    )
    assert [n for step in steps for n in step] == [n for n in range(18) if n % 3 != 1], (
        "without dynamic sampling"
    )
    assert ledger.counts[BROKEN] == 6 and not ledger.counts[NO_SIGNAL]


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_no_group_is_older_than_the_bound(staleness: int, seed: int) -> None:
    steps, _, ages = play(StepRule(4, 12, staleness=staleness), lambda _: True, seed)
    assert [number for step in steps for number in step] == list(range(48)), (
        "each once, in the order drawn"
    )
    assert 0 < max(ages) <= staleness
    ages = play(StepRule(4, 12, 3.0, 40, staleness), every(3), seed)[2]
    assert max(ages) <= staleness, "also where more are drawn than are wanted"


def test_unfinished_groups_stay_until_they_are_too_old() -> None:
    ledger = Ledger(StepRule(2, 9, oversampling=2.0, any_order=True, max_age=2))
    assert [ledger.draw() for _ in range(ledger.room())] == [0, 1, 2, 3]
    ledger.grade(3, True)
    assert not ledger.is_ready()
    ledger.grade(1, True)
    assert ledger.is_ready() and ledger.take() == [1, 3] and not ledger.surplus(), (
        "the oldest available ones"
    )
    ledger.advance()
    assert (ledger.first, ledger.next, ledger.in_flight, ledger.room()) == (
        0,
        4,
        2,
        2,
    ) and not ledger.expired()
    for step in (2, 3):
        for number in [ledger.draw() for _ in range(ledger.room())]:
            ledger.grade(number, True)
        assert ledger.take() == [2 * step, 2 * step + 1]
        ledger.advance()
    assert ledger.expired() == [0, 2], "drawn three steps ago"
    assert (
        ledger.counts == {"drawn": 8, "trained": 6, FILLED: 0, NO_SIGNAL: 0, STALE: 2, BROKEN: 0}
        and ledger.first == 8
    )


def test_a_stale_group_pins_no_resume_position() -> None:
    """Neither one that is dropped while it is in flight, nor one that a step passes over."""
    in_flight = Ledger(StepRule(1, 9, oversampling=2.0, any_order=True, max_age=1))
    assert [in_flight.draw() for _ in range(in_flight.room())] == [0, 1]
    for step in (1, 2):
        in_flight.grade(step, True)
        assert in_flight.take() == [step]
        in_flight.advance()
        assert [in_flight.draw() for _ in range(in_flight.room())] == [step + 1]
        assert step == 2 or not in_flight.expired(), "max_age is allowed"
    assert in_flight.first == 0 and in_flight.expired() == [0] and in_flight.first == 3
    graded = Ledger(StepRule(1, 9, windows=2))
    old = graded.draw()
    for _ in range(2):
        graded.grade(old, True)
        assert graded.take([old]) == [old]
        graded.advance()
    graded.grade(old, True)
    graded.grade(graded.draw(), True)
    assert graded.first == old and graded.take() == [1] and graded.first == 2
    for ledger in (in_flight, graded):
        again = Ledger(ledger.rule, ledger.first, ledger.trained)
        again.restore(json.loads(json.dumps(ledger.state())), {})
        assert 0 not in again and again.counts[STALE] == 1, "it is neither drawn nor counted again"


def test_a_ledger_goes_on_where_it_was_saved() -> None:
    ledger = Ledger(StepRule(2, 9, staleness=2))
    for number in [ledger.draw() for _ in range(ledger.room())]:
        if number not in (3, 5):
            ledger.grade(number, True)
    assert ledger.take() == [0, 1]
    again = Ledger(ledger.rule, first=2, step=0)
    again.taken = 1
    state = json.loads(json.dumps(ledger.state()))
    assert again.restore(state, {2: True, 4: True}) == [3, 5] and again.state() == ledger.state()
    assert again.counts["drawn"] == 6 == again.counts["trained"] + again.in_flight + again.graded
    later = Ledger(ledger.rule, first=7, step=0)
    assert later.restore(state, {}) == [] and later.next == 7, "a run that leaves prompts out"
    assert later.counts[STALE] == 4 and later.counts["drawn"] == 6 == later.counts["trained"] + 4


def test_a_group_is_trained_in_no_more_steps_than_windows() -> None:
    ledger = Ledger(StepRule(1, 9, windows=2))
    number = ledger.draw()
    for _ in range(2):
        ledger.grade(number, True)
        assert ledger.take([number]) == [number]
        assert not ledger.surplus() and number in ledger, "its next window is to come"
        ledger.advance()
    ledger.grade(number, True)
    assert not ledger.is_ready() and ledger.room() == 1, "it is too old for a third step"
    ledger.grade(ledger.draw(), True)
    assert ledger.take() == [1] and ledger.counts[STALE] == 1


def test_groups_of_a_later_step_than_allowed_are_not_drawn() -> None:
    ledger = Ledger(StepRule(4, 10, staleness=1))
    assert ledger.room() == 8, "steps 1 and 2"
    for _ in range(8):
        ledger.grade(ledger.draw(), True)
    assert ledger.room() == 0 and ledger.take() == [0, 1, 2, 3] and ledger.room() == 0
    ledger.advance()
    assert ledger.room() == 4
    last = Ledger(StepRule(4, 1, staleness=5))
    assert last.room() == 4, "there is no step 2"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("oversampling", [1.0, 1.7])
def test_of_groups_that_come_back_in_any_order_all_are_trained(
    seed: int, oversampling: float
) -> None:
    steps, ledger, _ = play(
        StepRule(3, 20, oversampling, any_order=True, max_age=99), every(1), seed
    )
    trained = sorted(number for step in steps for number in step)
    waiting = [number for number in range(ledger.next) if number in ledger]
    assert len(trained) == 60 and sorted(trained + waiting) == list(range(ledger.next)), "each once"


@pytest.mark.parametrize(
    "rule",
    [StepRule(0, 1), StepRule(0, 1, oversampling=3.0, most_draws=0), StepRule(0, 1, staleness=2)],
)
def test_its_work_grows_with_the_groups_not_with_their_square(rule: StepRule) -> None:
    """Rank 0's event loop is blocked meanwhile: 8,192 groups once took 15 s a step."""
    calls = Counter[int]()
    before = sys.getprofile()
    ledger_file = sys.modules[Ledger.__module__].__file__

    def count(frame: FrameType, event: str, _: Any) -> None:
        calls[groups] += event == "call" and frame.f_code.co_filename == ledger_file

    for groups in (64, 512):
        chance = random.Random(groups)
        ledger = Ledger(
            replace(
                rule,
                groups=groups,
                most_draws=rule.most_draws if rule.most_draws is None else 3 * groups,
            )
        )
        sys.setprofile(count)
        flying = [ledger.draw() for _ in range(ledger.room())]
        while not ledger.is_ready():
            place = chance.randrange(len(flying))
            flying[place], number = flying[-1], flying[place]
            flying.pop()
            if number in ledger:
                ledger.grade(number, rule.most_draws is None or number % 2 == 0)
                ledger.surplus()
                flying += [ledger.draw() for _ in range(ledger.room())]
        assert len(ledger.take()) == groups
        sys.setprofile(before)
    assert calls[512] < 12 * calls[64], "8 times as many groups"
