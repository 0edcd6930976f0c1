"""What a node reports, and what only several nodes together show: one file system, equal software.

The processes of doctor meet in a store in which each leaves values for the others. Collectives would wait for a broken
node; here each node reads what is there and names the nodes that are missing.
"""

import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from vapo_megatron.config.run_directory import existing
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.run.place import RankPlace

_POLL_SECONDS = 0.05
# Network file systems show a new file to other nodes after their attribute caches have run out.
_APPEARS_WITHIN = 30.0


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


class Meeting:
    """The nodes that take part, one process each, as one of them sees them. Without a place this process is alone."""

    def __init__(self, place: RankPlace | None, node: str, deadline: float) -> None:
        """Tell of this process and wait for the others, at most `deadline` seconds.

        Raises:
            RunFailed: the place where they meet cannot be reached.
        """
        self.node = node
        self._store: Store | None = None
        rank, world = (place.rank, place.world_size) if place is not None else (0, 1)
        self.rank = rank
        self.missing: list[int] = []
        if place is None or world == 1:
            self.nodes, self.ranks = [node], [0]
            return
        host, port, serves = _address(place)
        try:
            store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=deadline))
        except (DistStoreError, RuntimeError) as error:
            first = str(error).partition("\n")[0]
            raise RunFailed(
                f"doctor on {node} (rank {rank}): nobody meets at {host}:{port} within {deadline:g} s ({first}): see "
                "that MASTER_ADDR is rank 0's node, that MASTER_PORT is free there, and that no firewall is in between"
            ) from None
        self._store = PrefixStore("doctor", store)
        self.put(f"place/{rank}", node)
        if rank == 0:
            self.put("nodes", self._gather(world, deadline))
        names = self.get("nodes", 2 * deadline)
        if names is None:
            raise RunFailed(f"doctor on {node} (rank {rank}): rank 0 at {host}:{port} fell silent: see its output")
        self.nodes, self.ranks, self.missing = names["nodes"], names["ranks"], names["missing"]

    @property
    def leads(self) -> bool:
        """Whether this process examines its node; its other processes have nothing to do."""
        return self.rank in self.ranks

    @property
    def index(self) -> int:
        """This node's number; 0 is where rank 0 is."""
        return self.ranks.index(self.rank)

    def put(self, key: str, value: Any) -> None:
        """Leave a word; anything that JSON holds."""
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def get(self, key: str, deadline: float) -> Any:
        """A value that another node has set; None where it was not there within `deadline` seconds."""
        end = time.monotonic() + deadline
        while self._store is not None:
            if self._store.check([key]):
                return json.loads(self._store.get(key))
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        return None

    def get_all(self, key: str, deadline: float) -> list[Any]:
        """What each node has set under `key`/<its number>, in their order; `deadline` is for all of them together."""
        end = time.monotonic() + deadline
        return [self.get(f"{key}/{node}", max(0.0, end - time.monotonic())) for node in range(len(self.nodes))]

    def _gather(self, world: int, deadline: float) -> dict[str, Any]:
        """On rank 0: the first rank of each node, and the ranks that did not come."""
        end = time.monotonic() + deadline
        first: dict[str, int] = {}
        missing = []
        for rank in range(world):
            name = self.get(f"place/{rank}", max(0.0, end - time.monotonic()))
            if name is None:
                missing.append(rank)
            else:
                first.setdefault(name, rank)
        return {"nodes": list(first), "ranks": list(first.values()), "missing": missing}


def _address(place: RankPlace) -> tuple[str, int, bool]:
    """Host and port of the meeting, and whether this process serves it. torchrun serves one for its ranks itself."""
    if place.init_method.startswith("tcp://"):
        host, _, port = place.init_method.removeprefix("tcp://").rpartition(":")
    else:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise BadInput("MASTER_ADDR and MASTER_PORT are not set: ranks need a place to meet; export both")
    served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return host, int(port), place.rank == 0 and not served_by_torchrun


def check_shared_files(meeting: Meeting, root: Path, deadline: float) -> list[Line]:
    """Whether every node sees what node 0 writes under run.root."""
    folder, remedy = existing(root.absolute()), "put run.root on a file system that all nodes mount, at the same path"
    if len(meeting.nodes) == 1:
        return [Line("not applicable", "one node")]
    if meeting.index == 0:
        path, content = folder / f".doctor.shared.{secrets.token_hex(4)}", secrets.token_hex(1 << 15)
        try:
            path.write_text(content)
            meeting.put("shared", [str(path), hashlib.sha256(content.encode()).hexdigest()])
            meeting.put("shared/seen/0", True)
            meeting.get_all("shared/seen", deadline)  # the file stays until everybody has looked
        except OSError as error:
            return [Line("fault", f"{folder} cannot be written ({error.strerror or error})", remedy)]
        finally:
            path.unlink(missing_ok=True)
        return [Line("ok", f"{folder}: written for the others to see")]
    shared = meeting.get("shared", deadline)
    if shared is None:
        return [Line("warning", "node 0 wrote no file", "see its lines")]
    path, digest, end = Path(shared[0]), shared[1], time.monotonic() + _APPEARS_WITHIN
    while not (seen := path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    meeting.put(f"shared/seen/{meeting.index}", True)
    if not seen:
        return [Line("fault", f"{path}, which node 0 wrote, is not seen here with its content", remedy)]
    return [Line("ok", f"{folder}: the same as on node 0")]


def check_alike(meeting: Meeting, facts: dict[str, str], deadline: float) -> list[Line]:
    """Whether this node's facts are those of most nodes."""
    meeting.put(f"alike/{meeting.index}", facts)
    counted = Counter(
        json.dumps(others, sort_keys=True) for others in meeting.get_all("alike", deadline) if others is not None
    )
    usual = json.loads(counted.most_common(1)[0][0])
    different = [f"{key} {facts[key]}, most nodes have {usual[key]}" for key in facts if facts[key] != usual.get(key)]
    if different:
        return [Line("fault", "; ".join(different), "give all nodes the same environment, driver and files")]
    return [Line("ok", ", ".join(f"{key} {value}" for key, value in facts.items()))]
