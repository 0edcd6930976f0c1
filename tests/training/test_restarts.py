"""Ranks that are killed are started again in the same process, from a copy in host memory or the last checkpoint."""

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attempts
import pytest
import torch.distributed as dist
from damage import flip
from tiny_runs import make_model, problems, write_rows

from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.rollout.server import EngineAddress
from vapo_megatron.training import checkpoint, launch, restarts
from vapo_megatron.training.resume import Start


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("restarts")
    train, evaluation = (write_rows(folder / f"{name}.jsonl", problems(64)) for name in ("train", "eval"))
    world = attempts.World(folder, make_model(folder / "model"), train, evaluation, EngineAddress("", ""))
    return attempts.config_of(world, "run", {"tp": 1}, "cluster.ranks=2", "cluster.restarts=2")


@pytest.mark.parametrize(
    ("checkpoints", "kills", "ends_well"),
    [
        # The checkpoint that each start finds; how many of them are killed.
        (["", "", "", ""], 2, True),
        (["", "", "", ""], 3, False),
        (["", "a", "a", "b", "b"], 4, True),
        (["", "a", "a", "a"], 3, False),
    ],
)
def test_killed_ranks_start_again(
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: list[str],
    kills: int,
    ends_well: bool,
) -> None:
    found = iter(checkpoints)
    resumes: list[str] = []

    def prepare(settings: TrainConfig, check: Callable[[], None], take: Callable[[], None]) -> Start:
        resumes.append(settings.run.resume)
        name = next(found)
        return Start(Path(name) if name else None)

    for module in (launch, restarts):
        monkeypatch.setattr(module, "prepare_start", prepare)

    def body(run_dir: Path, start: Start) -> None:
        if dist.get_rank() == 1:
            number = len(list(tmp_path.iterdir()))
            (tmp_path / f"{number}_{start.checkpoint}").touch()
            if number < kills:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    if ends_well:
        assert launch.launch(config, body, lambda *_: None)
    else:
        with pytest.raises(TryAgain, match="rank1 was killed by SIGKILL"):
            launch.launch(config, body, lambda *_: None)
    starts = sorted(path.name.partition("_")[2] for path in tmp_path.iterdir())
    expected = [name or "None" for name in checkpoints[: kills + ends_well]]
    assert starts == sorted(expected)
    assert resumes[0] == "never" and set(resumes[1:]) == {"auto"}


STEPS = ("run.resume=auto", "run.steps=6", "value_pretraining.enabled=false", "data.eval=[]")
SAVES = ("checkpoint.every=2", "checkpoint.every_minutes=null")


def kill_twice_and_damage_the_second_copy(folder: Path) -> None:
    """Rank 1 dies in its third step, and after its next start in its second."""
    first, second = folder / "killed", folder / "killed_again"
    attempts.kill_at("policy update", 5, 1, first)
    killed_again = attempts.kill_at  # the same trap, laid once the first one was sprung
    prepare, copy_in = restarts.start_ranks, restarts._copy_in

    def start_ranks(*args: object) -> None:
        if first.exists() and not second.exists():
            killed_again("policy update", 3, 1, second)
        prepare(*args)  # type: ignore[arg-type]

    def damaged(*args: object) -> Path | None:
        copy = copy_in(*args)  # type: ignore[arg-type]
        if copy is not None and second.exists():
            flip(max((copy / "critic").glob("*.distcp"), key=lambda path: path.stat().st_size))
        return copy

    restarts.start_ranks, restarts._copy_in = start_ranks, damaged
    checkpoint._COPYING_SHARE = 1e9  # a copy after each step, however short


def test_a_copy_in_host_memory_costs_no_step_and_a_damaged_one_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with attempts.world(tmp_path) as world:
        alone = attempts.config_of(world, "alone", {"tp": 1}, *STEPS)
        assert attempts.live(world, alone, 2) == attempts.End(0, "")
        config = attempts.config_of(world, "run", {"tp": 1}, *STEPS, *SAVES, "cluster.restarts=2")
        capfd.readouterr()
        prepare = partial(kill_twice_and_damage_the_second_copy, tmp_path)
        assert attempts.live(world, config, 2, prepare) == attempts.End(0, "")
    run_dir, memory = Path(config.run.directory), host_memory_of(Path(config.run.directory))
    started = re.findall(
        r"WARNING rank - -: (.*); ranks are started again in this process, from (\S+)", capfd.readouterr().err
    )
    (first, copy), (second, other), (damage, last) = started
    assert first == second == "rank1 was killed by SIGKILL and said nothing"
    assert copy.startswith(f"{memory}/checkpoints/step_00000") and other > copy
    assert damage.startswith(f"{other}: the content of critic/") and last == f"{run_dir}/checkpoints/step_000002"
    assert attempts.metrics(run_dir) == attempts.metrics(Path(alone.run.directory))
    weights = "hf/final/actor/model.safetensors"
    assert (run_dir / weights).read_bytes() == (Path(alone.run.directory) / weights).read_bytes()
    assert not memory.exists()
