"""Ranks that are killed are started again in the same process, from a copy in host memory or the last checkpoint."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import attempts
import pytest
import torch.distributed as dist
from tiny_runs import make_model, problems, write_rows

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.rollout.server import EngineAddress
from vapo_megatron.training import launch, restarts
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
