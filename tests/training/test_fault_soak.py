"""Faults of every kind, at random times: the run ends as one that was left alone, and nothing stays behind."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attempts
import fault_soak
import pytest
from engine_faults import same_run
from fault_soak import Fuzzer, Soak, temporary_files_of_its_own

from vapo_megatron.checkpoint import checkpointer as checkpoint
from vapo_megatron.checkpoint.host_memory import host_memory_of

STEPS = 12
SETTINGS = (
    "run.resume=auto",
    f"run.steps={STEPS}",
    "cluster.restarts=3",
    "cluster.collective_timeout_s=300",
    "rollout.collect_timeout_s=250",
    "value_pretraining.enabled=false",
    "data.eval=[]",
    "checkpoint.every=3",
    "checkpoint.every_minutes=null",
    "reward.function=parity_grade:verify_with_bombs",
    "rollout.health.answer_s=5",
    "rollout.health.max_failures=20",
    "robustness.hangs.floor_s=30",
)
AHEAD = (
    *("rollout.asynchronous.max_staleness=1", "rollout.asynchronous.weight_sync=wait", "rollout.deterministic=true"),
    "algorithm.importance_sampling.kind=tis",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[attempts.World]:
    with attempts.world(tmp_path_factory.mktemp("soak")) as made:
        yield made


def last_progress(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of prompts, groups and updates."""
    found: dict[str, Any] = json.loads((run_dir / f"checkpoints/step_{STEPS:06d}/progress.json").read_text())
    return found


def disturbed(world: attempts.World, tmp_path: Path, faults: int, kinds: tuple[str, ...], *more: str) -> Soak:
    """Runs under so many faults in all, each compared with the same one that was left alone."""
    seed = int(os.environ.get("SEED", "1"))
    alone = attempts.config_of(world, f"{tmp_path.name}_alone", {"tp": 1}, *SETTINGS, *more)
    assert alone.cluster.ranks is not None
    end = attempts.live(world, alone, alone.cluster.ranks)
    assert end.code == 0, end.said
    chance, soak, number = random.Random(seed), Soak(), 0
    while (left := faults - soak.faults.total()) > 0:
        number += 1
        own = f"rollout.num_engines={alone.cluster.ranks // 2}"
        config = attempts.config_of(world, f"{tmp_path.name}_{number}", {"tp": 1}, *SETTINGS, own, *more)
        with temporary_files_of_its_own():
            Fuzzer(config, chance, kinds, min(left, 2 * STEPS), soak).run(1800)
        run_dir, other = Path(config.run.directory), Path(alone.run.directory)
        rows = same_run(run_dir, other)
        soak.faults["verifier: bomb"] += round(sum(row["reward/failed"] for row in rows) * 16)
        assert last_progress(run_dir) == last_progress(other), "every sample drawn is trained or dropped, once"
        print(f"\n{soak.faults.total()} faults, attempts by code {dict(soak.codes)}\n{soak.table()}", flush=True)
    assert not soak.left, soak.left
    return soak


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_under_a_fault_of_each_sort(
    world: attempts.World, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a model that is cut in two."""
    monkeypatch.setattr(checkpoint, "_COPYING_SHARE", 1e9)  # a copy after each step, however short
    alone, config = (
        attempts.config_of(
            *(world, name, {"tp": 2}, *SETTINGS, "run.steps=9", "cluster.ranks=4", "checkpoint.every=5"),
            "robustness.hangs.floor_s=12",
        )
        for name in ("alone", "faults")
    )
    assert attempts.live(world, alone, 4) == attempts.End(0, "")
    plan = [
        # A stopped engine is noticed after rollout.health.answer_s, which may be a step later: its row must be written
        # before the run is asked to end.
        *((2, "rank: kill -9"), (3, "copy in memory: flipped bit"), (4, "engine: stopped"), (6, "run: SIGUSR1")),
        *((7, "verifier: kill -9"), (8, "rank: stopped")),
    ]
    soak = Soak()
    capfd.readouterr()
    with temporary_files_of_its_own():
        Fuzzer(config, random.Random(1), (), 0, soak, plan).run(600)
    run_dir, memory = Path(config.run.directory), host_memory_of(Path(config.run.directory))
    rows = same_run(run_dir, Path(alone.run.directory))
    assert soak.codes == {75: 1, 0: 1} and not soak.left
    assert sum(row["rollout/engine_failures"] for row in rows) >= 1
    said = capfd.readouterr().err
    again = rf"; ranks are started again in this process, from {memory}/checkpoints/step_00000(\d)"
    assert re.findall(rf"was killed by SIGKILL.*{again}", said) and "has changed since it was saved" in said, said
    assert re.findall(rf"did not arrive; .*{again}", said), said
    assert soak.seconds["rank: stopped"][0] < 60


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("more", [(), AHEAD], ids=["synchronous", "asynchronous"])
def test_a_run_under_many_faults(world: attempts.World, tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    faults = -(-int(os.environ.get("FAULTS", "100")) // 4)
    soak = disturbed(world, tmp_path, faults, fault_soak.KINDS, f"cluster.ranks={ranks}", *more)
    assert soak.faults.total() >= faults
