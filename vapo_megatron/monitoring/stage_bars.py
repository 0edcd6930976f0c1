"""Bars for the stages of a tool's work, on standard error; only lines of text where that is a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def stage_bars(in_bytes: bool) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A function that begins a stage, by its name and size (0: unknown), and gives one that takes what of it is done.

    in_bytes: that is what stages are counted in, and their bars stay; others go with the block.
    """
    counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
    if in_bytes:
        counted = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description:>10}"), BarColumn(), *counted)
    console = Console(stderr=True)
    # Of bars that go with the block an empty line would be left in a file.
    hidden = not in_bytes and not console.is_terminal
    with Progress(*columns, console=console, transient=not in_bytes, disable=hidden) as bars:

        def begin(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total or None)
            return lambda amount: bars.advance(task, amount)

        yield begin
