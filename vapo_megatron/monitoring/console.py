"""What a person sees of a run: a table that grows by a line per step, and progress inside long phases.

On a terminal rich draws it; in a log file the same lines come without colours, cursor movements or carriage returns,
and progress as a line from time to time.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from vapo_megatron.monitoring import names

Advance = Callable[[int], None]
Metrics = Mapping[str, float | None]

HEAD_EVERY = 20  # lines between repetitions of the table's head
LOG_WIDTH = 120
_WIDEST_TABLE = 10_000
LOG_SECONDS = 30.0  # between two lines of progress in a log

# Title, width, metric and format of each column after the step's own.
COLUMNS: tuple[tuple[str, int, str, str], ...] = (
    ("accuracy", 8, names.ACCURACY, ".3f"),
    ("reward", 7, names.REWARD, ".3f"),
    ("length", 8, names.LENGTH, ".1f"),
    ("value EV", 8, names.EXPLAINED_VARIANCE, ".3f"),
    ("gain", 7, names.CRITIC_GAIN, ".3f"),
    ("entropy", 8, names.ENTROPY, ".4f"),
    ("KL", 8, names.TRAIN_INFER_KL, ".1e"),
    ("tok/s", 8, names.TOKENS_PER_SECOND, ",.0f"),
    ("s/step", 7, names.STEP_TIME, ".2f"),
)


class RunConsole:
    """The console of rank 0; on other ranks, with enabled=False, it says nothing."""

    def __init__(self, file: IO[str] | None = None, enabled: bool = True, log_seconds: float = LOG_SECONDS) -> None:
        """file defaults to standard output; log_seconds is the pause between lines of progress in a log."""
        output = file if file is not None else sys.stdout
        is_terminal = output.isatty()
        self._console = Console(
            file=output,
            force_terminal=is_terminal,
            no_color=None if is_terminal else True,
            width=None if is_terminal else LOG_WIDTH,
            quiet=not enabled,
            highlight=False,
        )
        self._log_seconds = log_seconds
        self._lines = 0

    def header(self, title: str, facts: Mapping[str, object]) -> None:
        """The opening block: what runs, and the facts of its config that matter."""
        self._block(title, facts, "bold cyan")

    def closing(self, title: str, facts: Mapping[str, object]) -> None:
        """The last block: what was reached and where its files are."""
        self._block(title, facts, "bold green")

    def note(self, text: str) -> None:
        """A remark between the lines of the table."""
        self._print(text, "dim")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table with its first column to the left and metrics to the right."""
        table = Table(box=box.SIMPLE_HEAD)
        for column, title in enumerate(titles):
            table.add_column(title, justify="right" if column else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        # As wide as it is: a log has no width, and a terminal wraps what others cut to "0.0…".
        width, self._console.width = self._console.width, _WIDEST_TABLE
        try:
            self._console.print(table)
        finally:
            self._console.width = width
        self._console.file.flush()

    def alarm(self, text: str) -> None:
        """A line in bold red."""
        self._print(f"ALARM  {text}", "bold red")

    def step(self, step: int, steps: int, metrics: Metrics) -> None:
        """The line of a step, `step` of `steps`; metrics that are absent or not finite show as '-'."""
        counter = len(str(steps)) * 2 + 1
        if self._lines % HEAD_EVERY == 0:
            head = "step".rjust(max(counter, 4)) + "".join(f"  {title:>{width}}" for title, width, _, _ in COLUMNS)
            self._print(head, "bold")
        self._lines += 1
        cells = "".join(f"  {_cell(metrics.get(name), form):>{width}}" for _, width, name, form in COLUMNS)
        self._print(f"{step}/{steps}".rjust(max(counter, 4)) + cells, "")

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Progress of a phase while the body runs; the body calls the yielded function with how much it has done.

        total is None where the amount is not known beforehand. A phase within a phase gets a bar below the outer one.
        """
        if self._console.is_terminal and not self._console.quiet:
            with self._bar(name, total) as advance:
                yield advance
        else:
            yield self._log_lines(name, total)

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(40))
        with Progress(
            *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self._console, transient=True
        ) as progress:
            task = progress.add_task(name, total=total)
            yield lambda amount: progress.advance(task, amount)

    def _log_lines(self, name: str, total: int | None) -> Advance:
        start = last = time.monotonic()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done, last
            done += amount
            now = time.monotonic()
            if now - last >= self._log_seconds:
                last = now
                of_total = f"/{total} ({done / total:.0%})" if total else ""
                self._print(f"  {name}: {done}{of_total} after {now - start:.0f} s", "dim")

        return advance

    def _block(self, title: str, facts: Mapping[str, object], style: str) -> None:
        width = max((len(name) for name in facts), default=0)
        self._print("", "")
        self._print(f"== {title} ".ljust(min(self._console.width, LOG_WIDTH), "="), style)
        for name, fact in facts.items():
            self._console.print(
                Text.assemble((f"   {name:<{width}}  ", "dim"), str(fact)), soft_wrap=True, highlight=False
            )
        self._print("", "")

    def _print(self, text: str, style: str) -> None:
        # soft_wrap: a line of a log stays one line, however long.
        self._console.print(Text(text, style=style), soft_wrap=True)
        self._console.file.flush()


def _cell(value: float | None, form: str) -> str:
    # NaN and the infinities have no place in a column of metrics: alarms report them.
    return "-" if value is None or value - value != 0 else format(value, form)


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars on standard error: a function that begins a stage of given name and bytes, and returns one that advances it.

    A file gets plain lines.
    """
    counted = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description:>10}"), BarColumn(), *counted)
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def begin(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total or None)
            return lambda amount: bars.advance(task, amount)

        yield begin
