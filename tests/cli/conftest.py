from pathlib import Path

import pytest
from commands import Command
from tiny_runs import make_model

from vapo_megatron.run import launch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_ranks", started)
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(tmp_path: Path, model: Path) -> Command:
    return Command(tmp_path, model)
