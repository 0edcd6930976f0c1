"""The nodes of a run: which ranks share host memory, and files that go from one node's to another's."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.collectives import gather_values

# Of a file, sent at once.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Nodes:
    """Ranks by the folder that they share.

    Attributes:
        places: of each rank, in words that only ranks of its node have.
    """

    places: tuple[str, ...]

    @classmethod
    def of(cls, place: Path) -> "Nodes":
        """Collective. place: this rank's folder; ranks of one node name the same one, others another one."""
        return cls(tuple(gather_values(str(place))))

    @property
    def count(self) -> int:
        """Of nodes."""
        return len(set(self.places))

    @property
    def own(self) -> list[int]:
        """Ranks of this node."""
        return self._ranks_of(self.places[dist.get_rank()])

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what its node does once."""
        return self.own[0] == dist.get_rank()

    def keeper(self, rank: int) -> int:
        """The rank on the next node that keeps a second copy of what a rank has written."""
        order = list(dict.fromkeys(self.places))
        place = self.places[rank]
        there = self._ranks_of(order[(order.index(place) + 1) % len(order)])
        return there[self._ranks_of(place).index(rank) % len(there)]

    def kept_by(self, rank: int) -> list[int]:
        """The ranks that `rank` is the keeper of."""
        return [other for other in range(len(self.places)) if self.keeper(other) == rank]

    def _ranks_of(self, place: str) -> list[int]:
        return [rank for rank, other in enumerate(self.places) if other == place]


def send_to_keepers(nodes: Nodes, folder: Path, own: Mapping[str, int], group: Any) -> OSError | None:
    """Collective: each rank's files go to its keeper, which has them under the same names; what was in the way there.

    Args:
        nodes: of the run.
        folder: of this node, where the files are and those of others come.
        own: bytes of this rank's files, by their path in the folder.
        group: a CPU process group of all ranks.
    """
    rank = dist.get_rank()
    listed = gather_values(dict(own), group)
    sent = [work for name in sorted(own) for work in _send(folder / name, own[name], nodes.keeper(rank), group)]
    failed: OSError | None = None
    for source in nodes.kept_by(rank):
        for name in sorted(listed[source]):
            failed = receive_file(folder / name, listed[source][name], source, group) or failed
    for work, _ in sent:
        work.wait()
    return failed


def fetch_files(
    nodes: Nodes, folder: Path, wanted: Mapping[str, int], held: Sequence[set[str]], group: Any
) -> OSError | None:
    """Collective: files that this rank's node lacks come from nodes that hold them; what was in the way here.

    Args:
        nodes: of the run.
        folder: of this node.
        wanted: bytes of files that this rank needs, by their path; those that are here already do not come.
        held: names of files by rank: those that its node has.
        group: a CPU process group of all ranks.
    """
    rank, failed = dist.get_rank(), None
    missing = {name: size for name, size in wanted.items() if name not in held[rank]}
    # One rank of a node asks for all of it; the same order everywhere, so that nobody waits for a circle.
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for asking, names in enumerate(gather_values(missing, group)):
        for name, size in names.items():
            first.setdefault((name, nodes.places[asking]), (asking, size))
    for number, ((name, _), (target, size)) in enumerate(sorted(first.items())):
        holders = [other for other, names in enumerate(held) if name in names]
        source = holders[number % len(holders)]
        if rank == source:
            for work, _ in _send(folder / name, size, target, group):
                work.wait()
        elif rank == target:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            failed = receive_file(folder / name, size, source, group) or failed
    dist.barrier(group=group)
    return failed


def receive_file(path: Path, size: int, source: int, group: Any) -> OSError | None:
    """Take a file that another rank sends; where it cannot be written it is taken all the same, and left."""
    failed: OSError | None = None
    into: torch.Tensor | None = None
    try:
        with path.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so now, and not by a signal later
        into = _mapped(path, size, writes=True)
    except OSError as error:
        failed = error
        path.unlink(missing_ok=True)
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        part = torch.empty(length, dtype=torch.uint8) if into is None else into[start : start + length]
        dist.recv(part, src=source, group=group)
    return failed


def _send(path: Path, size: int, target: int, group: Any) -> list[tuple[Any, torch.Tensor]]:
    """What is under way, with the memory that it comes from."""
    content = _mapped(path, size)
    parts = [content[start : start + _CHUNK_BYTES] for start in range(0, size, _CHUNK_BYTES)]
    return [(dist.isend(part, dst=target, group=group), part) for part in parts]


def _mapped(path: Path, size: int, writes: bool = False) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)
