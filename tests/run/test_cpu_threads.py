"""Threads of ranks and engines on machines without GPUs."""

from pathlib import Path

import attempts
import pytest
import torch
import torch.distributed as dist
from tiny_runs import make_model, problems, write_rows

from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.run import launch


def config_with(folder: Path, *overrides: str) -> TrainConfig:
    rows = write_rows(folder / "rows.jsonl", problems(64))
    model = make_model(folder / "model")
    world = attempts.World(folder, model, rows, rows, EngineAddress("", ""))
    return attempts.config_of(world, "run", {"tp": 1}, "cluster.ranks=2", *overrides)


@pytest.mark.parametrize(("overrides", "threads"), [((), 1), (("cluster.cpu_threads=3",), 3)])
def test_each_rank_computes_with_the_threads_of_the_config(
    overrides: tuple[str, ...], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_threads(run_dir: Path, start: Start) -> None:
        (tmp_path / f"rank{dist.get_rank()}").write_text(str(torch.get_num_threads()))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch, "prepare_start", lambda *_: Start(None))
    config = config_with(tmp_path, *overrides)
    assert launch.launch(config, write_threads, lambda *_: None)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [str(threads)] * 2


@pytest.mark.parametrize(("settings", "threads"), [({}, "1"), ({"cpu_threads": 3}, "3")])
def test_an_engine_computes_with_the_threads_of_the_config(
    settings: dict[str, int], threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    config = RolloutConfig(**settings)
    server = EngineServer(tmp_path, config, "float32", tmp_path / "log", None, host="127.0.0.1")
    assert server._environment(tmp_path)["OMP_NUM_THREADS"] == threads
