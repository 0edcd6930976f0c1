"""The nodes of a run: which ranks share host memory, and how files are copied from one node to
another."""

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    list_checkpoints,
    remove_leftovers,
)
from vapo_megatron.checkpoint.manifest import Manifest, check_contents, readable_manifests
from vapo_megatron.collectives import broadcast_value, gather_values
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.mesh import world_timeout

_logger = logging.getLogger(__name__)

# The extension of tensor files, of which a rank needs few; all other files are small, and every
# node gets them.
_TENSORS = ".distcp"
# Bytes of a file that are sent at once.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Nodes:
    """Ranks by the folder that they share. places: the folder of each rank, the same for ranks of
    one node only."""

    places: tuple[str, ...]

    @classmethod
    def of(cls, place: Path) -> "Nodes":
        """Collective. place: this rank's folder, the same for ranks of one node only."""
        return cls(tuple(gather_values(str(place))))

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(set(self.places))

    @property
    def own(self) -> list[int]:
        """The ranks of this node."""
        return self._ranks_of(self.places[dist.get_rank()])

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work that its node does once."""
        return self.own[0] == dist.get_rank()

    def keeper(self, rank: int) -> int:
        """The rank on the next node that keeps a second copy of the files of a rank."""
        order = list(dict.fromkeys(self.places))
        place = self.places[rank]
        there = self._ranks_of(order[(order.index(place) + 1) % len(order)])
        return there[self._ranks_of(place).index(rank) % len(there)]

    def kept_by(self, rank: int) -> list[int]:
        """The ranks of which `rank` is the keeper."""
        return [
            node_rank for node_rank in range(len(self.places)) if self.keeper(node_rank) == rank
        ]

    def _ranks_of(self, place: str) -> list[int]:
        return [rank for rank, place_of_rank in enumerate(self.places) if place_of_rank == place]


def send_to_keepers(
    nodes: Nodes, folder: Path, own: Mapping[str, int], group: Any
) -> OSError | None:
    """Collective: send each rank's files to its keeper, which stores them under the same names.
    Returns why this rank could not store a file, if so.

    Args:
        nodes: the nodes of the run.
        folder: the folder of this node, for its own files and the other node's.
        own: size of each file of this rank, by its path in the folder.
        group: a CPU process group of all ranks.
    """
    rank = dist.get_rank()
    listed = gather_values(dict(own), group)
    sent = [
        work
        for name in sorted(own)
        for work in _send(folder / name, own[name], nodes.keeper(rank), group)
    ]
    failed: OSError | None = None
    for source in nodes.kept_by(rank):
        for name in sorted(listed[source]):
            failed = receive_file(folder / name, listed[source][name], source, group) or failed
    for work, _ in sent:
        work.wait()
    return failed


def receive_file(path: Path, size: int, source: int, group: Any) -> OSError | None:
    """Receive a file that another rank sends. If it cannot be written, it is received and
    discarded, and the error returned."""
    failed: OSError | None = None
    into: torch.Tensor | None = None
    try:
        with path.open("wb") as file:
            if size:
                # A full disk raises here, not by SIGBUS later
                os.posix_fallocate(file.fileno(), 0, size)
        into = _mapped(path, size, writes=True)
    except OSError as error:
        failed = error
        path.unlink(missing_ok=True)
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        if into is None:
            part = torch.empty(length, dtype=torch.uint8)
        else:
            part = into[start : start + length]
        dist.recv(part, src=source, group=group)
    return failed


def _send(path: Path, size: int, target: int, group: Any) -> list[tuple[Any, torch.Tensor]]:
    """The pending sends, each with the memory that it reads from."""
    content = _mapped(path, size)
    parts = [content[start : start + _CHUNK_BYTES] for start in range(0, size, _CHUNK_BYTES)]
    return [(dist.isend(part, dst=target, group=group), part) for part in parts]


def _mapped(path: Path, size: int, writes: bool = False) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)


@dataclass
class NodeCopy:
    """A copy as this rank's node has it. path: its folder on this node; group: a CPU process group
    of all ranks;
    held: the files that the node of each rank has, by rank."""

    path: Path
    manifest: Manifest
    nodes: Nodes
    group: Any
    held: list[set[str]] = field(default_factory=list)

    def look(self) -> list[str]:
        """Collective: find out which node holds which files, comparing every byte with its digest.
        Returns those that no node holds whole."""
        files = {name: path for name in self.manifest.files if (path := self.path / name).is_file()}
        mine = sorted(files)[self.nodes.own.index(dist.get_rank()) :: len(self.nodes.own)]
        good = []
        for name in mine:
            wrong = check_contents(self.path, {files[name]: self.manifest.files[name]})
            if wrong is None:
                good.append(name)
            else:
                _logger.warning("%s: %s", self.path, wrong)
                files[name].unlink(missing_ok=True)
        self._note(good)
        return sorted(self.manifest.files.keys() - set().union(*self.held))

    def fetch(self, names: Iterable[str]) -> None:
        """Collective: have the named files on this node; those that are copied are compared with
        their digests.

        Raises:
            TryAgain: a file cannot be written here, or was changed in transit.
        """
        rank = dist.get_rank()
        failed = None
        nodes = self.nodes
        sizes = {name: self.manifest.files[name].bytes for name in names}
        missing = {name: size for name, size in sizes.items() if name not in self.held[rank]}
        # One rank of a node asks for all of it. The order is the same everywhere, so that no ranks
        # wait in a circle.
        requests: dict[tuple[str, str], tuple[int, int]] = {}
        for asking, wanted in enumerate(gather_values(missing, self.group)):
            for name, size in wanted.items():
                requests.setdefault((name, nodes.places[asking]), (asking, size))
        for number, ((name, _), (target, size)) in enumerate(sorted(requests.items())):
            holders = [holder for holder, held in enumerate(self.held) if name in held]
            source = holders[number % len(holders)]
            if rank == source:
                for work, _ in _send(self.path / name, size, target, self.group):
                    work.wait()
            elif rank == target:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                failed = receive_file(self.path / name, size, source, self.group) or failed
        dist.barrier(group=self.group)
        if failed is not None:
            raise TryAgain(
                f"{self.path}: cannot be written ({failed.strerror}): start the same command again"
            )
        wrong = check_contents(
            self.path, {self.path / name: self.manifest.files[name] for name in missing}
        )
        if wrong is not None:
            raise TryAgain(
                f"{self.path}: {wrong}, on its way between nodes: start the same command again"
            )
        self._note(sizes)

    def _note(self, names: Iterable[str]) -> None:
        """Collective: tell all ranks which files each rank has found on its node."""
        held = gather_values(set(names), self.group)
        before = self.held or [set() for _ in held]
        places = self.nodes.places
        self.held = [
            before[rank].union(
                *(
                    held[neighbour]
                    for neighbour, place in enumerate(places)
                    if place == places[rank]
                )
            )
            for rank in range(len(held))
        ]


def find_copy(memory: Path, run_dir: Path) -> NodeCopy | None:
    """Collective: the newest copy of which the nodes still have all files, unless the last
    checkpoint is newer.

    memory: the folder of this node's copies.
    """
    nodes = Nodes.of(memory)
    group = dist.new_group(timeout=world_timeout(), backend="gloo")
    if nodes.is_leader:
        remove_leftovers(memory)
    if nodes.is_leader:
        here = readable_manifests(memory)
    else:
        here = {}
    seen = gather_values(
        {(name, manifest.checkpoint_id): manifest for name, manifest in here.items()}, group
    )
    newest = broadcast_value(max(list_checkpoints(run_dir), default=None))
    manifests = {key: manifest for copies in seen for key, manifest in copies.items()}
    chosen = None
    for name, checkpoint_id in sorted(manifests, reverse=True):
        if chosen is not None or (newest is not None and name < newest):
            break
        path = memory / CHECKPOINT_FOLDER / str(name)
        copy = NodeCopy(path, manifests[name, checkpoint_id], nodes, group)
        lacking = copy.look()
        if not lacking:
            chosen = copy
        elif dist.get_rank() == 0:
            _logger.warning("%s: %s is on no node; it is left aside", path, lacking[0])
    if nodes.is_leader:
        for path in list_checkpoints(memory).values():
            if chosen is None or path != chosen.path:
                # It would take the place of those that come
                shutil.rmtree(path, ignore_errors=True)
    if chosen is not None:
        chosen.fetch(name for name in chosen.manifest.files if not name.endswith(_TENSORS))
    return chosen
