"""The commands of the command line, called in this process with a config that works until a case
spoils it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from called import exit_code_of
from tiny_runs import evaluate_config, sft_config, train_config, write_config

CONFIGS = {"train": train_config, "sft": sft_config, "evaluate": evaluate_config}


class Command:
    """One of the three commands with a config that works, until a case spoils it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.run_dir = folder / "runs" / "tiny"

    def exit_code(
        self, command: str, *overrides: str, config: Mapping[str, Any] | Path | None = None
    ) -> int:
        if not isinstance(config, Path):
            content = config or CONFIGS[command](self.folder, self.model)
            config = write_config(self.folder / f"{command}.yaml", content)
        return exit_code_of(command, config, *overrides)


class Ranks:
    """Stand in for the ranks that a command starts and for the report that it draws of their run.

    A start fails the test until may_start() is called.

    Attributes:
        starts: the number of ranks, for every start.
        reports: the run directories, for every report.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.reports: list[list[Path]] = []
        self._run: Callable[[], None] | None = None
        self._report: Callable[[], str] = str

    def may_start(
        self, run: Callable[[], None] = lambda: None, report: Callable[[], str] = str
    ) -> None:
        """run: called in place of the ranks. report: called in place of drawing; gives the path
        that is printed."""
        self._run = run
        self._report = report

    def start(self, count: int, *_: object) -> None:
        assert self._run is not None, "ranks were started"
        self.starts.append(count)
        self._run()

    def draw(self, run_dirs: list[Path]) -> str:
        self.reports.append(run_dirs)
        return self._report()


def assert_refused(command: Command, code: int, error: str, *named: str) -> None:
    """Exit code 2 and one line that holds every text of `named`; no run directory, whole or in
    part."""
    assert code == 2, error
    lines = error.splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("vapo-megatron: ") and "Traceback" not in error
    for text in named:
        assert text in lines[0]
    assert not command.run_dir.exists()
    root = command.folder / "runs"
    assert not root.exists() or not root.is_dir() or not list(root.iterdir())
