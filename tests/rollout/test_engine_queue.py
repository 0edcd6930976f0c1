"""Which engine gets the next group: the least loaded one with room, found without looking at
all."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vapo_megatron.rollout.engine_queue import EngineLoad, EngineQueue

MOST_REQUESTS = 10


def make_engines(count: int) -> list[EngineLoad]:
    clients: list[Any] = [
        SimpleNamespace(address=SimpleNamespace(url=f"http://engine{place}"))
        for place in range(count)
    ]
    return [EngineLoad(client) for client in clients]


def work(samples: int, tokens: int) -> Any:
    return SimpleNamespace(samples=samples, max_tokens=tokens)


def least_loaded(engines: list[EngineLoad], samples: int, preferred: str) -> EngineLoad | None:
    """The choice by its definition, looking at every engine."""
    able = [
        engine
        for engine in engines
        if not engine.lost and (engine.requests == 0 or engine.requests + samples <= MOST_REQUESTS)
    ]
    return min(able, key=lambda engine: (engine.url != preferred, engine.tokens), default=None)


@pytest.mark.parametrize("seed", range(10))
def test_the_least_loaded_engine_with_room_is_picked(seed: int) -> None:
    chance = random.Random(seed)
    engines = make_engines(7)
    queue = EngineQueue(engines, MOST_REQUESTS)
    running: list[tuple[EngineLoad, Any]] = []
    picked = 0
    for _ in range(2000):
        action = chance.random()
        if action < 0.1:
            engine = chance.choice(engines)
            engine.lost = not engine.lost
            queue.update(engine)
        elif action < 0.5 and running:
            engine, group = running.pop(chance.randrange(len(running)))
            engine.remove(group, 0.0)
            queue.update(engine)
        else:
            # Separate sizes, as agents and evaluations have, and one above the limit.
            group = work(chance.choice([1, 4, 4, 4, 12]), chance.randrange(5, 9))
            preferred = chance.choice(["", "", "http://engine3", "http://gone"])
            choice = queue.pick(group.samples, preferred)
            assert choice is least_loaded(engines, group.samples, preferred)
            if choice is not None:
                choice.add(group, 0.0)
                queue.update(choice)
                running.append((choice, group))
                picked += 1
    assert picked > 300
    for engine in engines:
        groups = [group for owner, group in running if owner is engine]
        assert engine.requests == sum(group.samples for group in groups)
        assert engine.tokens == sum(group.max_tokens for group in groups)


def test_a_pick_does_not_look_at_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = make_engines(500)
    queue = EngineQueue(engines, MOST_REQUESTS)
    group = work(4, 100)
    queue.pick(4)
    looks = 0
    has_room = EngineQueue._has_room

    def counted(self: EngineQueue, engine: EngineLoad) -> bool:
        nonlocal looks
        looks += 1
        return has_room(self, engine)

    monkeypatch.setattr(EngineQueue, "_has_room", counted)
    for _ in range(1000):
        engine = queue.pick(4)
        assert engine is not None
        engine.add(group, 0.0)
        queue.update(engine)
    assert queue.pick(4) is None, "every engine is full"
    assert looks == 1000, "one look for each group"


def test_an_engine_is_busy_from_its_first_group_to_its_last() -> None:
    (engine,) = make_engines(1)
    group = work(1, 5)
    assert engine.busy_seconds(9.0) == 0
    engine.add(group, 10.0)
    engine.add(group, 12.0)
    assert engine.busy_seconds(13.0) == 3
    engine.remove(group, 14.0)
    assert engine.busy_seconds(15.0) == 5
    engine.remove(group, 16.0)
    assert engine.busy_seconds(20.0) == 6, "it is idle"
    engine.add(group, 20.0)
    assert engine.busy_seconds(20.5) == 6.5
    engine.remove(group, 21.0)
    assert engine.busy_seconds(30.0) == 7
