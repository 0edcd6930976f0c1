"""What doctor says: a line a check, a report a node, a grade over all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "warning", "fault", "skipped", "not applicable"]

_FORMAT = 1
# From the least to the worst; what was not looked at says nothing.
_COLOURS: dict[Status, str] = {
    "not applicable": "dim",
    "skipped": "dim",
    "ok": "green",
    "warning": "yellow",
    "fault": "bold red",
}
_ORDER = tuple(_COLOURS)


@dataclass(frozen=True)
class Line:
    """What a check found, and for all but "ok" what to do about it. check: its name, which perform() puts in."""

    status: Status
    found: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The lines of one node; rank is that of the process that examined it."""

    node: str
    rank: int
    lines: tuple[Line, ...]

    @property
    def status(self) -> Status:
        """The worst of its lines."""
        return worst(line.status for line in self.lines)


def worst(statuses: Iterable[Status]) -> Status:
    """The worst of some statuses."""
    return max(statuses, key=_ORDER.index, default="ok")


def broken_nodes(reports: Sequence[NodeReport]) -> list[str]:
    """Nodes with a fault, each once: those a next try had better leave out."""
    return list(dict.fromkeys(report.node for report in reports if report.status == "fault"))


def as_json(reports: Sequence[NodeReport]) -> dict[str, Any]:
    """The machine-readable form; broken_nodes has the names that Slurm knows the nodes by."""
    return {
        "format": _FORMAT,
        "status": worst(report.status for report in reports),
        "broken_nodes": broken_nodes(reports),
        "nodes": [{**asdict(report), "status": report.status} for report in reports],
    }


def from_json(value: Mapping[str, Any]) -> NodeReport:
    """A node's report as it came from another process."""
    return NodeReport(value["node"], value["rank"], tuple(Line(**line) for line in value["lines"]))


def show(reports: Sequence[NodeReport], console: Console) -> None:
    """Print a table. Lines that several nodes share are printed once, with the number of nodes."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("check", "", "nodes", "found", "what to do"):
        table.add_column(title, overflow="fold")
    together: dict[Line, list[str]] = {}
    for report in reports:
        for line in report.lines:
            together.setdefault(line, []).append(report.node)
    checks = list(dict.fromkeys(line.check for line in together))
    for line, nodes in sorted(together.items(), key=lambda item: checks.index(item[0].check)):
        named = "all" if len(nodes) == len(reports) else ", ".join(nodes[:4]) + (" ..." if len(nodes) > 4 else "")
        colour = _COLOURS[line.status]
        table.add_row(line.check, f"[{colour}]{line.status}[/]", named, escape(line.found), escape(line.remedy))
    console.print(table)
    if broken := broken_nodes(reports):
        console.print(f"[bold red]broken[/]: {', '.join(broken)}")
    elif worst(report.status for report in reports) == "warning":
        console.print("warnings alone: the run may be started")
