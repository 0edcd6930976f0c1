"""Whole tiny runs whose engine works ahead: when which groups are trained, their age, and what a
kill costs (nothing)."""

import json
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from attempts import End, World, config_of, kill_at, left_behind, live, make_world, metrics
from command_lines import command_line

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.rollout import stream

pytestmark = pytest.mark.full

AHEAD = (
    "rollout.asynchronous.max_staleness=1",
    "algorithm.importance_sampling.kind=tis",
    "evaluation.every=null",
)
STEPS = ("run.steps=5", "value_pretraining.iterations=1", "value_pretraining.steps=2")
SAVED = ("run.resume=auto",)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress) -> World:
    return make_world(tmp_path_factory.mktemp("ahead"), engine_of_runs)


def ahead(shared: World, name: str, *overrides: str) -> tuple[TrainConfig, Path]:
    config = config_of(shared, name, {}, *AHEAD, *STEPS, *overrides)
    return config, Path(config.run.directory)


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = (run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "estimates"}
        for line in lines
    ]


def trained(run_dir: Path) -> list[str]:
    """The prompts of all steps, in the order trained."""
    return [
        row["prompt_id"]
        for step in range(1, 6)
        for row in samples(run_dir, step)
        if row["index"] == 0
    ]


def test_killed_wherever_it_goes_on_to_the_bit(shared: World) -> None:
    config, straight = ahead(shared, "straight", "checkpoint.every_minutes=null")
    assert live(shared, config, 1) == End(0, "")
    rows = {row["step"]: row for row in metrics(straight) if row["step"] > 0}
    assert [rows[step]["rollout/age_mean"] for step in range(1, 6)] == [0, 1, 1, 1, 1]
    versions = [{row["weight_version"] for row in samples(straight, step)} for step in range(1, 6)]
    first = min(versions[0])
    assert versions == [{first}, {first}, {first + 1}, {first + 2}, {first + 3}]
    assert len(set(trained(straight))) == 20, "no prompt twice within an epoch"

    config, killed = ahead(shared, "killed", *SAVED)
    for phase, call in (("rollout", 3), ("policy update", 3), ("save", 2)):
        assert live(shared, config, 1, partial(kill_at, phase, call)).code == 75, phase
    # Groups that were taken, and those that the engines write ahead meanwhile.
    assert live(shared, config, 1, partial(kill_at, "scoring", 4, number=signal.SIGUSR1)).code == 75
    assert live(shared, config, 1) == End(0, "")
    assert metrics(killed) == metrics(straight)
    assert left_behind(killed) == left_behind(straight)


def kill_while_old_groups_are_awaited(call: int) -> None:
    """Have the scheduler of the only engine killed, once, in the call-th weight sync that waits, or
    a later one."""
    wait = stream.GroupStream.wait_until_graded
    calls = 0

    def trap(self: stream.GroupStream) -> None:
        nonlocal calls
        calls += 1
        if calls >= call and self._tasks:
            calls = -99
            schedulers = [
                p
                for p in psutil.Process().children(recursive=True)
                if "sglang::scheduler" in " ".join(command_line(p))
            ]
            schedulers[0].kill()
        wait(self)

    stream.GroupStream.wait_until_graded = trap  # type: ignore[method-assign]


def test_returning_engine_writes_old_groups_by_their_own_weights(shared: World) -> None:
    """The actor is newer when a weight sync waits: they would be the next policy's, and marked as
    the last one's."""
    own = ("sampling.max_new_tokens=40", "checkpoint.every=null", "checkpoint.every_minutes=null")
    config, straight = ahead(shared, "alone", *own)
    assert live(shared, config, 1) == End(0, "")
    config, run_dir = ahead(shared, "replaced", *own)
    assert live(
        shared, config, 1, partial(kill_while_old_groups_are_awaited, 3), own_engines=True
    ) == End(0, "")
    assert sum(row.get("rollout/engine_failures", 0) for row in metrics(run_dir)) == 1
    assert [samples(run_dir, step) for step in range(1, 6)] == [
        samples(straight, step) for step in range(1, 6)
    ]


def test_no_response_is_lost_or_trained_twice_under_new_weights(shared: World) -> None:
    going_on = (
        "rollout.deterministic=false",
        "rollout.asynchronous.weight_sync=retract",
        "sampling.max_new_tokens=40",
    )
    config, run_dir = ahead(shared, "retract", *going_on, *SAVED)
    for phase, call in (("policy update", 3), ("save", 2)):
        assert live(shared, config, 1, partial(kill_at, phase, call)).code == 75, phase
    assert live(shared, config, 1) == End(0, "")
    straight, other = ahead(shared, "retract_straight", *going_on)
    assert live(shared, straight, 1) == End(0, "")
    assert trained(run_dir) == trained(other), "the same prompts, in the order drawn"
    rows = [row for row in metrics(other) if row["step"] > 0]
    assert all(0 <= row["rollout/age_mean"] <= row["rollout/age_max"] <= 1 for row in rows)
    assert any(0 < row.get("rollout/age_0_share", 0) < 1 for row in rows), (
        "tokens of old and new weights in one step"
    )
    assert all(row["importance/ratio_max"] < 10 for row in rows)


def test_partial_responses_go_on_in_later_steps(shared: World) -> None:
    partial_responses = (
        "rollout.asynchronous.max_staleness=0",
        "rollout.partial_responses.oversampling=1.5",
    )
    config, run_dir = ahead(
        shared, "partial", *partial_responses, "sampling.max_new_tokens=40", *SAVED
    )
    for phase, call in (("rollout", 4), ("policy update", 3)):
        assert live(shared, config, 1, partial(kill_at, phase, call)).code == 75, phase
    assert live(shared, config, 1) == End(0, "")
    assert len(trained(run_dir)) == len(set(trained(run_dir))) == 20
    rows = [row for row in metrics(run_dir) if row["step"] > 0]
    assert all(row["rollout/age_max"] <= 4 for row in rows) and any(
        row["rollout/age_max"] > 0 for row in rows
    )
    ledger = json.loads((run_dir / "checkpoints/step_000005/progress.json").read_text())["groups"]
    counts = ledger["counts"]
    assert (
        counts["drawn"]
        == counts["trained"] + counts["stale"] + len(ledger["drawn_at"])
        > counts["trained"]
        == 20
    )


def test_windows_train_step_by_step_and_kills_change_nothing(shared: World) -> None:
    windows = (
        "rollout.asynchronous.max_staleness=0",
        "rollout.windows=3",
        "algorithm.shaping.truncated=window",
    )
    settings = (*windows, "sampling.max_new_tokens=30", "run.steps=4")
    config, straight = ahead(shared, "windows", *settings, "checkpoint.every_minutes=null")
    assert live(shared, config, 1) == End(0, "")
    rows = [row for row in metrics(straight) if row["step"] > 0]
    assert all(row["rollout/age_max"] == 0 for row in rows)
    assert 0 < rows[0]["rollout/goes_on_share"] < 1
    seen = [
        {(row["prompt_id"], row["index"]): row["tokens"] for row in samples(straight, step)}
        for step in range(1, 5)
    ]
    again = [
        (before[key], after[key])
        for before, after in pairwise(seen)
        for key in before.keys() & after
    ]
    assert again and all(0 < after - before <= 10 for before, after in again), (
        "a window more than in the step before"
    )

    config, killed = ahead(shared, "windows_killed", *settings, *SAVED)
    for phase, call in (("rollout", 3), ("policy update", 3)):
        assert live(shared, config, 1, partial(kill_at, phase, call)).code == 75, phase
    assert live(shared, config, 1) == End(0, "")
    assert metrics(killed) == metrics(straight)
    assert left_behind(killed) == left_behind(straight)
