"""A command with a config that works, and what stands in for the ranks that it would start."""

from pathlib import Path

import pytest
from commands import Command, Ranks
from tiny_runs import make_model

from vapo_megatron.operations.report import report
from vapo_megatron.run import launch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    stand_in = Ranks()
    monkeypatch.setattr(launch, "start_ranks", stand_in.start)
    monkeypatch.setattr(report, "write_report", stand_in.draw)
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return stand_in


@pytest.fixture
def command(tmp_path: Path, model: Path) -> Command:
    return Command(tmp_path, model)
