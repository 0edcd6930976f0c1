"""The commands of the command line, called in this process with a config that works until a case spoils it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from called import exit_code_of
from tiny_runs import evaluate_config, sft_config, train_config, write_config

CONFIGS = {"train": train_config, "sft": sft_config, "evaluate": evaluate_config}


class Command:
    """One of the three commands with a config that works, until a case spoils it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.run_dir = folder / "runs" / "tiny"

    def exit_code(self, command: str, *overrides: str, config: Mapping[str, Any] | Path | None = None) -> int:
        if not isinstance(config, Path):
            content = config or CONFIGS[command](self.folder, self.model)
            config = write_config(self.folder / f"{command}.yaml", content)
        return exit_code_of(command, config, *overrides)


def assert_refused(command: Command, code: int, error: str, *named: str) -> None:
    """Exit code 2 and one line that holds every text of `named`; no run directory, whole or in part."""
    assert code == 2, error
    lines = error.splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("vapo-megatron: ") and "Traceback" not in error
    for text in named:
        assert text in lines[0]
    assert not command.run_dir.exists()
    root = command.folder / "runs"
    assert not root.exists() or not root.is_dir() or not list(root.iterdir())
