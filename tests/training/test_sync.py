"""Which weights a sync sends while groups are still being written with older ones."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.engines.weight_sync.logprob_difference import LogprobDifference
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.sync import sync_weights


class Actor:
    def __init__(self) -> None:
        self.weights = "of step 1"

    def weights_on_host(self) -> str:
        return self.weights

    def put_weights(self, weights: str) -> None:
        self.weights = weights


class Engines:
    """Stands for the pool and its weights; notes the weights that were sent."""

    serving = 1
    failure = None
    sent_share = None

    def __init__(self, finishes_old_groups: bool) -> None:
        self.finishes_old_groups = finishes_old_groups
        self.sent: list[str] = []
        self.sync_seconds: dict[str, float] = {}

    def rank0_uses_engines(self) -> Any:
        return nullcontext()

    def wait_for_restart(self, make_room: Any) -> None: ...

    def offload_kv_cache(self) -> None: ...

    def onload(self, tag: str) -> None: ...

    def pop_failures(self) -> list[str]:
        return []

    def update_weights(self, actor: Actor, again: bool) -> None:
        self.sent.append(actor.weights)

    def check(self, *_: Any, **__: Any) -> LogprobDifference:
        return LogprobDifference(0.0, 0.0, 0.0)


def sent_before_and_after_a_restart(finishes_old_groups: bool) -> tuple[list[str], str]:
    """Weights that engines got at a step's sync and again after a later update, when an engine was
    restarted; and the actor's weights in the end."""
    engines = Engines(finishes_old_groups)
    actor = Actor()
    memory = SimpleNamespace(enter=lambda phase: None)
    models: Any = SimpleNamespace(actor=actor, memory=memory, served=None)
    rollouts: Any = SimpleNamespace(
        engines=engines,
        engine_weights=engines,
        engine_failures=0,
        probe=[],
        prepare_sync=lambda recorder: None,
    )
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        sync_weights(models, rollouts, recorder)
        actor.weights = "of step 2"
        sync_weights(models, rollouts, recorder, again=True)
    return engines.sent, actor.weights


def test_a_restarted_engine_gets_the_weights_of_its_groups() -> None:
    sent, left = sent_before_and_after_a_restart(finishes_old_groups=True)
    assert sent == ["of step 1", "of step 1"]
    assert left == "of step 2", "the trainer keeps its own"


def test_without_old_groups_the_newest_weights_are_sent() -> None:
    sent, left = sent_before_and_after_a_restart(finishes_old_groups=False)
    assert sent == ["of step 1", "of step 2"] and left == "of step 2"
