"""Faults of every kind, at random times: the run ends as one that was left alone, and nothing stays
behind."""

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attempts
import pytest
from engine_faults import same_run
from fault_soak import Fuzzer, Soak, cells, temporary_files_of_its_own

from vapo_megatron.checkpoint import checkpointer as checkpoint
from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.rollout.ledger import DROPPED

STEPS = 12
SETTINGS = (
    "run.resume=auto",
    f"run.steps={STEPS}",
    "cluster.restarts=3",
    "cluster.collective_timeout_s=300",
    "rollout.collect_timeout_s=250",
    "value_pretraining.enabled=false",
    "checkpoint.every=3",
    "checkpoint.every_minutes=null",
    "reward.function=parity_grade:verify_with_bombs",
    "rollout.health.answer_s=5",
    "rollout.health.max_failures=20",
    "robustness.hangs.floor_s=30",  # a weight sync may wait for an engine's start
)
# An engine's start takes minutes while other work loads the machine; a stopped rank is noticed
# after 16 s all the same.
PATIENT = "robustness.hangs.floor_s=150"
TIS = "algorithm.importance_sampling.kind=tis"


def ahead(steps: int, sync: str) -> tuple[str, ...]:
    """Settings of a run whose engines work so many steps ahead."""
    keys = (
        f"rollout.asynchronous.max_staleness={steps}",
        f"rollout.asynchronous.weight_sync={sync}",
        TIS,
    )
    return (*keys, f"rollout.deterministic={'true' if sync == 'wait' else 'false'}")


async def two_turns(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    """An agent that asks again whatever the answer was."""
    messages = list(task["messages"])
    for _ in range(2):
        answer = await http_client.post(
            f"{base_url}/chat/completions", json={"messages": messages, "max_tokens": 6}
        )
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "1 + 1"}]


class Hostile(BaseException):
    """No Exception, which code that is careful would catch."""


async def hostile(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    """Two turns; on some rows of the training data, an end of another kind after them."""
    await two_turns(task, base_url, http_client)
    number = int(task["id"].removeprefix("p"))
    act = number % 16
    if act == 5:
        raise asyncio.CancelledError
    if act == 9:
        sys.exit(3)
    if act == 13:
        raise Hostile
    while number == SWALLOWS:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


SWALLOWS = 12  # the row, of the second step, whose episodes swallow their cancellation


def agent(function: Callable[..., Any], timeout_s: int = 600) -> tuple[str, ...]:
    """Settings of a run whose episodes this function plays."""
    return (
        f"rollout.agent={__name__}:{function.__name__}",
        "rollout.episode.max_tokens=64",
        f"rollout.episode.timeout_s={timeout_s}",
        "data.max_prompt_tokens=32",
        "data.prompt.chat_template=true",
    )


@dataclass(frozen=True)
class Mode:
    """A way to run. repeats: two such runs are equal to the bit; waits: it waits for engines before
    a weight sync."""

    ranks: int = 2
    settings: tuple[str, ...] = ()
    repeats: bool = True
    waits: bool = False


MODES = {
    "synchronous": Mode(),
    "staleness 1": Mode(settings=ahead(1, "wait"), waits=True),
    "agents": Mode(settings=agent(two_turns)),
    "hostile agents": Mode(settings=agent(hostile, timeout_s=40)),
    "windows": Mode(settings=("rollout.windows=2", "algorithm.shaping.truncated=window")),
    "staleness 2": Mode(settings=ahead(2, "wait"), waits=True),
    "retract": Mode(settings=ahead(1, "retract"), repeats=False),
    "in_place": Mode(settings=ahead(1, "in_place"), repeats=False),
    "partial": Mode(settings=("rollout.partial_responses.oversampling=1.5", TIS), repeats=False),
    "synchronous, 4 ranks": Mode(4),
    "staleness 1, 4 ranks": Mode(4, ahead(1, "wait"), waits=True),
}
# What was done in all modes so far, by this process and those before it
# (tests/training/fault_table.py prints it).
RESULTS = Path(os.environ.get("FAULT_RESULTS", "build/faults.json"))


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress
) -> attempts.World:
    return attempts.make_world(tmp_path_factory.mktemp("soak"), engine_of_runs)


def last_progress(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of prompts, groups and updates."""
    found: dict[str, Any] = json.loads(
        (run_dir / f"checkpoints/step_{STEPS:06d}/progress.json").read_text()
    )
    return found


def check_ledger(progress: dict[str, Any]) -> None:
    """Every group that was drawn is trained, dropped for a reason, or on its way."""
    if groups := progress["groups"]:
        counts = groups["counts"]
        on_the_way = len(groups["drawn_at"])
        assert (
            counts["drawn"]
            == counts["trained"] + sum(counts.get(reason, 0) for reason in DROPPED) + on_the_way
        )


def disturb(world: attempts.World, name: str, mode: Mode, faults: int, soak: Soak) -> int:
    """Runs of a mode under so many faults in all, each compared with the same one that was left
    alone; their number."""
    folder = name.replace(" ", "_").replace(",", "")
    settings = (
        *SETTINGS,
        PATIENT,
        f"cluster.ranks={mode.ranks}",
        "evaluation.every=3",
        *mode.settings,
    )
    alone = attempts.config_of(world, f"{folder}_alone", {"tp": 1}, *settings)
    if mode.repeats:
        end = attempts.live(world, alone, mode.ranks, deadline=1200)
        assert end.code == 0, end.said
    chance = random.Random(f"{os.environ.get('SEED', '1')}/{name}")
    own = f"rollout.num_engines={mode.ranks // 2}"
    number = 0
    end_at = soak.faults.total() + faults
    while (left := end_at - soak.faults.total()) > 0:
        number += 1
        config = attempts.config_of(world, f"{folder}_{number}", {"tp": 1}, *settings, own)
        with temporary_files_of_its_own():
            Fuzzer(config, chance, min(left, 2 * STEPS), soak, cells(mode.waits)).run(3600)
        run_dir = Path(config.run.directory)
        other = Path(alone.run.directory)
        progress = last_progress(run_dir)
        check_ledger(progress)
        if mode.repeats:
            same_run(run_dir, other)
            assert progress == last_progress(other), (
                "every sample drawn is trained or dropped, once"
            )
        steps = [row["step"] for row in attempts.metrics(run_dir) if row["step"] > 0]
        assert steps == list(range(1, STEPS + 1))
        print(
            f"\n{name}: {soak.faults.total()} faults, codes {dict(soak.codes)}\n{soak.table()}",
            flush=True,
        )
    assert not soak.left, soak.left
    return number


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_under_a_fault_of_each_sort(
    world: attempts.World,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two copies of a model that is cut in two."""
    monkeypatch.setattr(checkpoint, "_COPYING_SHARE", 1e9)  # a copy after each step, however short
    alone, config = (
        attempts.config_of(
            world,
            name,
            {"tp": 2},
            *SETTINGS,
            "run.steps=9",
            "cluster.ranks=4",
            "checkpoint.every=5",
            "data.eval=[]",
        )
        for name in ("alone", "faults")
    )
    assert attempts.live(world, alone, 4) == attempts.End(0, "")
    plan = [
        # A stopped engine is noticed after rollout.health.answer_s, which may be a step later: its
        # row must be written before the run is asked to end.
        (2, "rank: kill -9"),
        (3, "copy in memory: flipped bit"),
        (4, "engine: stopped"),
        (6, "run: SIGUSR1"),
        (7, "verifier: kill -9"),
        (8, "rank: stopped"),
    ]
    soak = Soak()
    capfd.readouterr()
    with temporary_files_of_its_own():
        Fuzzer(config, random.Random(1), 0, soak, plan=plan).run(600)
    run_dir = Path(config.run.directory)
    memory = host_memory_of(Path(config.run.directory))
    rows = same_run(run_dir, Path(alone.run.directory))
    assert soak.codes == {75: 1, 0: 1} and not soak.left
    assert sum(row["rollout/engine_failures"] for row in rows) >= 1
    said = capfd.readouterr().err
    again = rf"; ranks are started again in this process, from {memory}/checkpoints/step_00000(\d)"
    assert (
        re.findall(rf"was killed by SIGKILL.*{again}", said)
        and "has changed since it was saved" in said
    ), said
    assert re.findall(rf"was stopped by a signal .*{again}", said), said
    assert soak.seconds["rank: stopped"][0] < 150, (
        "the watchdog names it, before the limit of collectives comes"
    )


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_of_hostile_agents_on_a_taken_port(
    world: attempts.World, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, config = (
        attempts.config_of(
            world,
            f"hostile_{name}",
            {"tp": 1},
            *SETTINGS,
            PATIENT,
            *agent(hostile, timeout_s=25),
            "run.steps=4",
            "checkpoint.every=4",
            "cluster.ranks=2",
            "data.eval=[]",
        )
        for name in ("alone", "faults")
    )
    assert attempts.live(world, alone, 2) == attempts.End(0, "")
    plan = [
        # While an episode sleeps
        (1, "engine: port taken"),
        (1, "owner: stopped for a while"),
        # While others end as no episode should, and that one is left behind
        (2, "owner: kill -9"),
    ]
    soak = Soak()
    capfd.readouterr()
    with temporary_files_of_its_own():
        Fuzzer(config, random.Random(1), 0, soak, plan=plan).run(600)
    rows = same_run(Path(config.run.directory), Path(alone.run.directory))
    assert soak.codes == {0: 1} and not soak.left
    assert sum(row["agent/broken_error"] for row in rows) > 0
    assert sum(row["agent/broken_timeout"] for row in rows) > 0, "none swallowed its cancellation"
    assert "cannot listen on 127.0.0.1, port" in capfd.readouterr().err
    print(soak.table())


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODES)
def test_runs_under_faults_of_each_family_in_each_phase(world: attempts.World, name: str) -> None:
    """FAULTS in all modes together; what was done least so far comes first."""
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"modes": {}, "cells": []}
    if name in done["modes"]:
        pytest.skip(f"done, as {RESULTS} says")
    soak = Soak(cells=Counter({(phase, family): count for phase, family, count in done["cells"]}))
    faults = -(-int(os.environ.get("FAULTS", "150")) // len(MODES))
    runs = disturb(world, name, MODES[name], faults, soak)
    done["cells"] = [[*cell, count] for cell, count in sorted(soak.cells.items())]
    mode = done["modes"].setdefault(name, {"runs": 0, "equal": MODES[name].repeats, "faults": {}})
    mode["runs"] += runs
    mode["faults"] = dict(sorted((Counter(mode["faults"]) + soak.faults).items()))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(done, indent=1))
