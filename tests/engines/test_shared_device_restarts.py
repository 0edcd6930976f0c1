"""An engine of a trainer that shares its device fails: it can start only where the models have left
the device."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from threads import on_threads

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.engines import pool
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.keeper import EngineStatus
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.weight_sync.logprob_difference import LogprobDifference
from vapo_megatron.engines.weight_sync.session import EngineLost
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.sync import sync_weights

URL = "http://engine:1"


class Placement:
    """One engine as its keeper treats it: it starts where it may, and then serves at the second
    look."""

    shares_memory = True
    is_external = False
    keeper = None
    others: tuple[EngineStatus, ...] = ()

    def __init__(self, state: Any, may_start: bool) -> None:
        self.state = state
        self.may_start = may_start
        self.failures = 0 if state == "serving" else 1
        self.looks = 0
        self.starts_ended = 0
        self.said: list[str] = []

    def engines(self) -> list[EngineStatus]:
        if self.state == "waiting" and self.may_start:
            self.state = "starting"
            self.looks = 0
        elif self.state == "starting":
            self.looks += 1
            if self.looks == 2:
                self.state = "serving"
                self.said.append("serves")
        failed = EngineStatus(URL, self.state, self.failures, 1, "gone", self.starts_ended)
        return [failed, *self.others]

    def let_start(self, allowed: bool) -> None:
        self.may_start = allowed
        if not allowed and self.state == "starting":
            self.state = "waiting"
            self.starts_ended += 1

    def fail(self, cause: str, served: bool = True) -> None:
        self.state = "waiting"
        self.failures += 1

    def change_memory(self, *_: Any) -> None: ...

    def survived(self, url: str) -> None: ...


class Session:
    """A weight sync in which the engine dies so many times."""

    sends = True
    sent_share = None

    def __init__(self, placement: Placement, deaths: int) -> None:
        self.placement = placement
        self.deaths = deaths
        self.served: list[str] = []

    def serve(self, starts: dict[str, int]) -> None:
        self.served = list(starts)

    def load(self, buckets: Any, version: int, times: Any, masks: Any) -> None:
        self.placement.said.append(f"version {version}")
        if self.deaths:
            self.deaths -= 1
            self.served = []
            raise EngineLost("gone")


def synced(placement: Placement, released: set[Any], deaths: int, again: bool) -> list[str]:
    """What happened on the device during a weight sync, in order."""
    engines = EnginePool.__new__(EnginePool)
    engines._placement = placement  # type: ignore[assignment]
    engines._released = released
    engines._in_rotation = {URL: 0}
    engines._causes = []
    engines._noted_failures = {}
    engines._user = None
    engines._resync = None
    engines.failure = None
    weights: Any = EngineWeights.__new__(EngineWeights)
    weights._pool = engines
    weights._session = Session(placement, deaths)
    weights._slots = None
    weights._pairs = False
    weights._bucket_limit = lambda: 1
    weights._config = SimpleNamespace(asynchronous=SimpleNamespace(max_staleness=0))
    weights._buckets = lambda *_: iter(())
    weights.check = lambda *_, **__: LogprobDifference(0.0, 0.0, 0.0)
    weights.version = 6
    models: Any = SimpleNamespace(
        actor=None, served=None, memory=SimpleNamespace(enter=placement.said.append)
    )
    rollouts: Any = SimpleNamespace(
        engines=engines,
        engine_weights=weights,
        engine_failures=0,
        probe=[],
        prepare_sync=lambda recorder: None,
    )
    engines.rank0_uses_engines = nullcontext  # type: ignore[method-assign]
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        sync_weights(models, rollouts, recorder, again)
    assert engines.serving == 1 and engines.failure is None
    assert "kv_cache" in engines._released, "the trainer has room until the check of a sync"
    return placement.said


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without an end fails."""
    looks = iter(range(20))

    def sleep(_: float) -> None:
        assert next(looks, None) is not None, "it waits for an engine that may not start"

    monkeypatch.setattr(pool, "time", SimpleNamespace(sleep=sleep))


def test_it_died_while_the_trainer_had_its_memory() -> None:
    placement = Placement("waiting", may_start=False)
    said = on_threads(1, synced, placement, {"weights", "kv_cache"}, 0, False)[0]
    assert said[:4] == ["rollout", "serves", "weight_sync", "version 7"]


def test_it_dies_in_a_weight_sync() -> None:
    placement = Placement("serving", may_start=False)
    said = on_threads(1, synced, placement, {"weights", "kv_cache"}, 1, False)[0]
    again = ["rollout", "serves", "weight_sync", "version 7"]
    assert said[:6] == ["weight_sync", "version 7", *again]


def test_it_starts_while_responses_are_written() -> None:
    placement = Placement("starting", may_start=True)
    said = on_threads(1, synced, placement, set(), 0, True)[0]
    assert said[:4] == ["rollout", "serves", "weight_sync", "version 6"]
    assert placement.starts_ended == 0


def rollouts_of_one_look(placement: Placement, count: int) -> list[str]:
    """The state of the engine after each of several rollouts that are shorter than its start."""
    engines = EnginePool.__new__(EnginePool)
    engines._placement = placement  # type: ignore[assignment]
    engines._released = {"weights", "kv_cache"}
    states = []
    for _ in range(count):
        engines.onload("weights")
        engines.onload("kv_cache")
        placement.engines()
        engines.offload()
        states.append(placement.state)
    return states


def test_short_rollouts_do_not_keep_it_from_starting() -> None:
    """Others serve meanwhile, so that no weight sync waits for it."""
    placement = Placement("waiting", may_start=False)
    placement.others = (EngineStatus("http://engine:2", "serving", 0, 0, ""),)
    assert on_threads(1, rollouts_of_one_look, placement, 3)[0] == ["waiting", "serving", "serving"]
    assert placement.starts_ended == 1
