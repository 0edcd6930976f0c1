"""Reports of nodes, and the checks that need several nodes: a shared file system, equal software.

Doctor's processes exchange values through a store. A collective would wait for a broken node; here
each node reads what the others have set, and names those that are missing.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from vapo_megatron.config.run_directory import existing
from vapo_megatron.errors import RunFailed
from vapo_megatron.run.launch_env import RankPlace

_POLL_SECONDS = 0.05
_APPEARS_WITHIN = 30.0  # attribute caches of network file systems have run out by then

Status = Literal["ok", "warning", "fault", "skipped", "not applicable"]
# From the least to the worst.
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
    """A finding, and for all but "ok" what to do about it. check: the name of the check; perform()
    fills it in."""

    status: Status
    found: str
    remedy: str = ""
    check: str = ""


def lines_of(good: str, *troubles: tuple[object, Status, str, str]) -> list[Line]:
    """A line for each trouble (condition, status, finding, remedy) whose condition holds; `good` if
    none does."""
    return [Line(*trouble) for holds, *trouble in troubles if holds] or [Line("ok", good)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class NodeReport:
    """The lines of one node; rank: the process that examined it."""

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
    """Nodes with a fault, each once, which the next try should leave out."""
    return list(dict.fromkeys(report.node for report in reports if report.status == "fault"))


def from_json(value: Mapping[str, Any]) -> NodeReport:
    """A node's report that another process has sent."""
    return NodeReport(value["node"], value["rank"], tuple(Line(**line) for line in value["lines"]))


def show(reports: Sequence[NodeReport]) -> None:
    """Print a table. Lines that several nodes share are printed once, with the number of nodes."""
    table = Table("check", "", "nodes", "found", "what to do", box=box.SIMPLE_HEAD)
    nodes_by_line: dict[Line, list[str]] = {}
    for report in reports:
        for line in report.lines:
            nodes_by_line.setdefault(line, []).append(report.node)
    checks = list(dict.fromkeys(line.check for line in nodes_by_line))
    for line, nodes in sorted(nodes_by_line.items(), key=lambda item: checks.index(item[0].check)):
        if len(nodes) == len(reports):
            named = "all"
        else:
            named = ", ".join(nodes[:4]) + (" ..." if len(nodes) > 4 else "")
        status = f"[{_COLOURS[line.status]}]{line.status}[/]"
        table.add_row(line.check, status, named, escape(line.found), escape(line.remedy))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    if broken := broken_nodes(reports):
        console.print(f"[bold red]broken[/]: {', '.join(broken)}")
    elif worst(report.status for report in reports) == "warning":
        console.print("warnings alone: the run may be started")


class Meeting:
    """All nodes that take part, as the process of one of them sees them. Without a place it is the
    only one.

    Attributes:
        nodes, ranks: names of all nodes, and the rank of the process that examines each.
        missing: ranks that did not appear in time.
        leads: whether this process examines its node; other processes of the node have nothing to
            do.
        index: this node's number; 0 is where rank 0 is.
    """

    def __init__(self, place: RankPlace | None, node: str, deadline: float) -> None:
        """Announce this process and wait for the others, at most `deadline` seconds.

        Raises:
            RunFailed: rank 0 cannot be reached.
        """
        self.node, self.rank, self._store = (
            node,
            0 if place is None else place.rank,
            self._join(place, node, deadline),
        )
        nodes: dict[str, Any] | None = {"nodes": [node], "ranks": [0], "missing": []}
        if place is not None and self._store is not None:
            self.put(f"place/{self.rank}", node)
            if self.rank == 0:
                self.put("nodes", self._gather(place.world_size, deadline))
            nodes = self.get("nodes", 2 * deadline)
        if nodes is None:
            raise RunFailed(
                f"doctor on {node} (rank {self.rank}): no answer from rank 0: see its output"
            )
        self.nodes = nodes["nodes"]
        self.ranks = nodes["ranks"]
        self.missing = nodes["missing"]
        self.leads = self.rank in self.ranks
        self.index = self.ranks.index(self.rank) if self.leads else -1

    def put(self, key: str, value: Any) -> None:
        """Set a value for the others to read: anything that JSON can hold."""
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def get(self, key: str, deadline: float) -> Any:
        """A value that another node has set; None where it was not there within `deadline`
        seconds."""
        end = time.monotonic() + deadline
        while self._store is not None:
            if self._store.check([key]):
                return json.loads(self._store.get(key))
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        return None

    def get_all(self, key: str, deadline: float) -> list[Any]:
        """The values that all nodes have set under `key`/<number>, in order; `deadline` is for all
        of them together."""
        end = time.monotonic() + deadline
        return [
            self.get(f"{key}/{node}", max(0.0, end - time.monotonic()))
            for node in range(len(self.nodes))
        ]

    def _gather(self, world: int, deadline: float) -> dict[str, Any]:
        """On rank 0: the first rank of each node, and the ranks that did not arrive."""
        end = time.monotonic() + deadline
        names = {
            rank: self.get(f"place/{rank}", max(0.0, end - time.monotonic()))
            for rank in range(world)
        }
        first = {name: rank for rank, name in reversed(names.items()) if name is not None}
        nodes = sorted(first, key=first.__getitem__)
        missing = [rank for rank, name in names.items() if name is None]
        return {"nodes": nodes, "ranks": [first[name] for name in nodes], "missing": missing}

    @staticmethod
    def _join(place: RankPlace | None, node: str, deadline: float) -> Store | None:
        """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves where torchrun does not; None
        for one process."""
        if place is None or place.world_size == 1:
            return None
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(
                host,
                port,
                is_master=serves,
                wait_for_workers=False,
                timeout=timedelta(seconds=deadline),
            )
        except (DistStoreError, RuntimeError) as error:
            first = str(error).partition("\n")[0]
            raise RunFailed(
                f"doctor on {node} (rank {place.rank}): rank 0 is not reached at {host}:{port} "
                f"within {deadline:g} s ({first}): check that MASTER_ADDR is its node, that the "
                "port is free and no firewall blocks it"
            ) from None
        return PrefixStore("doctor", store)


def check_shared_files(meeting: Meeting, root: Path, deadline: float) -> list[Line]:
    """Whether every node sees what node 0 writes under run.root."""
    folder = existing(root.absolute())
    remedy = "put run.root on a file system that all nodes mount, at the same path"
    if meeting.index == 0:
        try:
            with tempfile.NamedTemporaryFile(prefix=".doctor.shared.", dir=folder) as file:
                meeting.put("shared", file.name)
                meeting.put("shared/seen/0", True)
                # The file stays until everybody has looked
                meeting.get_all("shared/seen", deadline)
        except OSError as error:
            return [
                Line("fault", f"{folder} cannot be written ({error.strerror or error})", remedy)
            ]
        return [Line("ok", f"{folder}: written for the others to see")]
    path = meeting.get("shared", deadline)
    end = time.monotonic() + _APPEARS_WITHIN
    while path is not None and not (seen := Path(path).is_file()) and time.monotonic() < end:
        time.sleep(0.2)
    meeting.put(f"shared/seen/{meeting.index}", True)
    if path is None:
        return [Line("warning", "node 0 wrote no file", "see its lines")]
    unseen = f"{path}, which node 0 wrote, is not seen here"
    return lines_of(f"{folder}: the same as on node 0", (not seen, "fault", unseen, remedy))


def check_alike(meeting: Meeting, facts: dict[str, str], deadline: float) -> list[Line]:
    """Whether this node's facts agree with most nodes'."""
    meeting.put(f"alike/{meeting.index}", facts)
    of_nodes = [answer for answer in meeting.get_all("alike", deadline) if answer is not None]
    usual = json.loads(
        Counter(json.dumps(answer, sort_keys=True) for answer in of_nodes).most_common(1)[0][0]
    )
    different = [
        f"{key} {facts[key]}, most nodes have {usual[key]}"
        for key in facts
        if facts[key] != usual.get(key)
    ]
    return lines_of(
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        (
            different,
            "fault",
            "; ".join(different),
            "give all nodes the same environment, driver and files",
        ),
    )
