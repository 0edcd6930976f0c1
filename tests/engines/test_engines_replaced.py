"""A run whose engines are killed, stopped and made to lie ends as one that was not disturbed,
without a new start."""

import signal
from pathlib import Path

import attempts
import pytest
from engine_faults import disturb, same_run

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress

pytestmark = pytest.mark.full

SETTINGS = (
    "value_pretraining.enabled=false",
    "data.eval=[]",
    "checkpoint.every=null",
    "checkpoint.every_minutes=null",
    "rollout.health.answer_s=5",
)


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress
) -> attempts.World:
    return attempts.make_world(tmp_path_factory.mktemp("engines"), engine_of_runs)


def config_of(world: attempts.World, name: str, *more: str) -> TrainConfig:
    return attempts.config_of(world, name, {"tp": 1}, *SETTINGS, *more)


@pytest.fixture(scope="module")
def undisturbed(world: attempts.World) -> Path:
    config = config_of(world, "undisturbed")
    end = attempts.live(world, config, 2)
    assert end.code == 0, end.said
    return Path(config.run.directory)


def test_the_only_engine_lies(world: attempts.World, undisturbed: Path) -> None:
    """That the only one is stopped is tried in test_fault_soak.py."""
    config = config_of(world, "one")
    faults = {8: ("server", 0)}  # 4 groups a step
    end = attempts.live(world, config, 2, prepare=lambda: disturb(faults), own_engines=True)
    assert end.code == 0, end.said
    rows = same_run(Path(config.run.directory), undisturbed)
    assert sum(row["rollout/engine_failures"] for row in rows) == 1


def test_bounded_failures_save_the_run_and_end_it_with_the_cause(
    world: attempts.World,
) -> None:
    config = config_of(world, "given_up", "rollout.health.max_failures=0")
    faults = {7: ("scheduler", signal.SIGKILL)}  # in the second step
    end = attempts.live(world, config, 2, prepare=lambda: disturb(faults), own_engines=True)
    assert end.code == 75 and "an engine failed 1 times in a row" in end.said, end
    assert [path.name for path in (Path(config.run.directory) / "checkpoints").iterdir()] == [
        "step_000001"
    ]
