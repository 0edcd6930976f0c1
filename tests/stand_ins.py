"""What tests put in place of the machine: its GPUs, clock, temporary files, Python and hub (a
pytest plugin)."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Has torch report a number of GPUs, and the package see them; nothing runs on them."""
    import torch

    from vapo_megatron.megatron.platform import current_platform

    def show(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        current_platform.cache_clear()

    yield show
    current_platform.cache_clear()


class Clock:
    """A clock that a test sets, in seconds."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands for the clocks of this process that never go back."""
    stand_in = Clock()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: stand_in.now)
    return stand_in


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of /dev/shm, where runs keep copies of their state."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr("vapo_megatron.checkpoint.host_memory.ROOT", folder)
    return folder


@pytest.fixture
def look_every(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds between two looks: at servers, at the work of a dispatcher, at ranks."""

    def look(seconds: float) -> None:
        for pause in (
            "engines.keeper.LOOK_SECONDS",
            "rollout.dispatcher._LOOK_SECONDS",
            "run.ranks._LOOK_SECONDS",
        ):
            monkeypatch.setattr(f"vapo_megatron.{pause}", seconds)

    return look


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which this process, and those that it starts, make their temporary
    files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    return folder


class Python:
    """Stands for the Python that this process starts programs with. It notes them, and runs
    none."""

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "programs"
        self._refusal = folder / "refusal"
        self.path = folder / "python"
        self._notes.mkdir()
        self._refusal.touch()
        self.path.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"note, refusal = '{self._notes}/' + str(os.getpid()), open('{self._refusal}').read()\n"
            "with open(note + '.part', 'w') as file:\n    json.dump([sys.argv[1:], "
            "dict(os.environ)], file)\nos.rename(note + '.part', note + '.json')\nsys.exit(refusal "
            "or 0)\n"
        )
        self.path.chmod(0o755)

    def refuse(self, reason: str) -> None:
        """Have every program end with exit code 1 and a line on standard error."""
        self._refusal.write_text(reason)

    def wait(self) -> None:
        """Have every program wait for a minute from now on."""
        interpreter = self.path.read_text().splitlines()[0]
        self.path.write_text(f"{interpreter}\nimport time\ntime.sleep(60)\n")

    def programs(self) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and environment of the programs that were started since the last call, in no
        order."""
        notes = list(self._notes.glob("*.json"))
        programs = [json.loads(note.read_text()) for note in notes]
        for note in notes:
            note.unlink()
        return programs


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Python:
    stand_in = Python(tmp_path_factory.mktemp("python"))
    monkeypatch.setattr(sys, "executable", str(stand_in.path))
    return stand_in


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which Hugging Face's libraries look for downloads; they reach no
    network."""
    from huggingface_hub import constants  # it has read the environment when it was imported

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def use_engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets the replacement, in commands that start their own engines, of engines_of(model,
    rollout, ...)."""

    def use(engines_of: Any) -> None:
        starters = ("evaluation.command", "operations.critic_lab.start", "operations.chat.command")
        for starter in starters:
            monkeypatch.setattr(f"vapo_megatron.{starter}.engines_of", engines_of)

    return use


class Critic:
    """Stands for the critic of `vapo-megatron critic`.

    Attributes:
        asked: the states that it was asked about.
        values: gives the values, from the config, the states and the number of ranks; 0 for each
            token by default.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.values: Callable[[Any, Any, int], Any] | None = None

    def __call__(self, config: Any, drawn: Any, ranks: int) -> Any:
        import torch

        self.asked.append(drawn)
        return (
            torch.zeros(drawn.batch.response_tokens)
            if self.values is None
            else self.values(config, drawn, ranks)
        )


@pytest.fixture
def critic(monkeypatch: pytest.MonkeyPatch) -> Critic:
    stand_in = Critic()
    monkeypatch.setattr("vapo_megatron.operations.critic_lab.command.values_on_ranks", stand_in)
    return stand_in


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that failed are asked again at once."""
    for client in ("evaluation.openai_client", "rewards.judge"):
        monkeypatch.setattr(f"vapo_megatron.{client}._FIRST_PAUSE", 0.01)
