"""Faults of every kind, at random times: the run ends as one that was left alone, and nothing stays behind."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import attempts
import fault_soak
import pytest
from engine_faults import same_run
from fault_soak import Fuzzer, Soak, temporary_files_in

STEPS = 12
SETTINGS = (
    "run.resume=auto",
    f"run.steps={STEPS}",
    "value_pretraining.enabled=false",
    "data.eval=[]",
    "rollout.health.every_s=0.5",
    "rollout.health.answer_s=5",
    "rollout.health.max_failures=20",
    "robustness.hangs.every_s=0.5",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[attempts.World]:
    with attempts.world(tmp_path_factory.mktemp("soak")) as made:
        yield made


def disturbed(world: attempts.World, tmp_path: Path, seed: int, faults: int, kinds: tuple[str, ...]) -> Soak:
    """Runs under so many faults in all, each compared with the same one that was left alone."""
    alone = attempts.config_of(world, f"alone{seed}", {"tp": 1}, *SETTINGS)
    end = attempts.live(world, alone, fault_soak.RANKS)
    assert end.code == 0, end.said
    chance, soak, number = random.Random(seed), Soak(), 0
    while (left := faults - soak.faults.total()) > 0:
        number += 1
        config = attempts.config_of(world, f"run{seed}_{number}", {"tp": 1}, *SETTINGS)
        with temporary_files_in(tmp_path / f"tmp{number}"):
            Fuzzer(config, chance, kinds, min(left, 2 * STEPS), soak).run(1800)
        same_run(Path(config.run.directory), Path(alone.run.directory))
        print(f"\n{soak.faults.total()} faults, attempts by code {dict(soak.codes)}\n{soak.table()}", flush=True)
    assert not soak.left, soak.left
    return soak


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_a_run_under_many_faults(world: attempts.World, tmp_path: Path) -> None:
    faults, seed = int(os.environ.get("FAULTS", "100")), int(os.environ.get("SEED", "1"))
    soak = disturbed(world, tmp_path, seed, faults, fault_soak.KINDS)
    assert soak.faults.total() >= faults
