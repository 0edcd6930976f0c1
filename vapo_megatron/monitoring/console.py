"""The console of a run: a table that grows by one line per step, and the progress of long phases.

On a terminal rich draws it. A log file gets the same lines without colours or cursor movements, and
an occasional line of progress.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.pictures import Picture, show_picture

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
    """The console of rank 0; on other ranks, with enabled=False, it prints nothing."""

    def __init__(
        self, file: IO[str] | None = None, enabled: bool = True, log_seconds: float = LOG_SECONDS
    ) -> None:
        """file: default standard output. log_seconds: the time between two lines of progress in a
        log."""
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
        """The opening block: the command and the main facts of its config."""
        self._block(title, facts, "bold cyan")

    def closing(self, title: str, facts: Mapping[str, object]) -> None:
        """The last block: the result, and where its files are."""
        self._block(title, facts, "bold green")

    def note(self, text: str) -> None:
        """A remark between two lines of the table."""
        self._print(text, "dim")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table: its first column is aligned left, the others right."""
        table = Table(box=box.SIMPLE_HEAD)
        for column, title in enumerate(titles):
            table.add_column(title, justify="right" if column else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        # As wide as its content: a log has no width, and a narrow terminal should wrap cells rather
        # than cut them.
        width = self._console.width
        self._console.width = _WIDEST_TABLE
        try:
            self._console.print(table)
        finally:
            self._console.width = width
        self._console.file.flush()

    def picture(self, picture: Picture) -> None:
        """A picture, as wide as the terminal."""
        show_picture(picture, self._console)
        self._console.file.flush()

    def alarm(self, text: str) -> None:
        """A line in bold red."""
        self._print(f"ALARM  {text}", "bold red")

    def step(self, step: int, steps: int, metrics: Metrics) -> None:
        """The line of a step, `step` of `steps`; metrics that are absent or not finite show as
        '-'."""
        counter = len(str(steps)) * 2 + 1
        if self._lines % HEAD_EVERY == 0:
            head = "step".rjust(max(counter, 4)) + "".join(
                f"  {title:>{width}}" for title, width, _, _ in COLUMNS
            )
            self._print(head, "bold")
        self._lines += 1
        figures = [(metrics.get(name), form, width) for _, width, name, form in COLUMNS]
        # NaN and infinities do not fit a column of figures; alarms report them.
        shown = ["-" if x is None or x - x != 0 else format(x, form) for x, form, _ in figures]
        cells = "".join(
            f"  {cell:>{width}}" for cell, (_, _, width) in zip(shown, figures, strict=True)
        )
        self._print(f"{step}/{steps}".rjust(max(counter, 4)) + cells, "")

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Shows progress while the body runs, which calls the yielded function with the amount it
        has just done.

        total is None where the amount is not known beforehand. A phase within a phase gets a bar
        below the outer one.
        """
        if self._console.is_terminal and not self._console.quiet:
            with self._bar(name, total) as advance:
                yield advance
        else:
            yield self._log_lines(name, total)

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        columns = (
            SpinnerColumn(),
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
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
                if total:
                    of_total = f"/{total} ({done / total:.0%})"
                else:
                    of_total = ""
                self._print(f"  {name}: {done}{of_total} after {now - start:.0f} s", "dim")

        return advance

    def _block(self, title: str, facts: Mapping[str, object], style: str) -> None:
        width = max((len(name) for name in facts), default=0)
        self._print("", "")
        self._print(f"== {title} ".ljust(min(self._console.width, LOG_WIDTH), "="), style)
        for name, fact in facts.items():
            self._console.print(
                Text.assemble((f"   {name:<{width}}  ", "dim"), str(fact)),
                soft_wrap=True,
                highlight=False,
            )
        self._print("", "")

    def _print(self, text: str, style: str) -> None:
        # soft_wrap: a line of a log stays one line, however long.
        self._console.print(Text(text, style=style), soft_wrap=True)
        self._console.file.flush()


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars on standard error: the yielded function begins a stage of a name and size, and returns
    what advances it."""
    with Progress(console=Console(stderr=True)) as bars:

        def begin(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total or None)
            return lambda amount: bars.advance(task, amount)

        yield begin
