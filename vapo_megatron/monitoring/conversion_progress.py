"""The progress bar of a conversion."""

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ConversionProgress:
    """A bar for each stage, in bytes, on standard error; a context manager. Only lines of text where that is a file."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(binary_units=True))
        console = Console(stderr=True)
        self._bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, total: int) -> None:
        """Begin a bar of so many bytes."""
        self._task = self._bar.add_task(name, total=total)

    def advance(self, nbytes: int) -> None:
        """Move the newest bar."""
        if self._task is not None:
            self._bar.advance(self._task, nbytes)
