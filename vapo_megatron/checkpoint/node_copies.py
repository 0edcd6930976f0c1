"""Going on from a copy of a run's state in the host memory of several nodes, of which each holds a part, and the part
of the node before it."""

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    CheckpointName,
    list_checkpoints,
    remove_leftovers,
)
from vapo_megatron.checkpoint.manifest import Manifest, check_contents, needed_files, read_manifest, readable_manifests
from vapo_megatron.checkpoint.nodes import Nodes, fetch_files
from vapo_megatron.collectives import broadcast_value, gather_values
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.megatron.mesh import world_timeout

_logger = logging.getLogger(__name__)

# Files of tensors, which a rank needs few of; all others are small, and every node gets them.
_TENSORS = ".distcp"


@dataclass
class NodeCopy:
    """A copy, as this rank's node has it.

    Attributes:
        path: its folder on this node.
        manifest: of the whole copy.
        nodes: of the run.
        group: a CPU process group of all ranks.
        held: by rank, which files its node has.
    """

    path: Path
    manifest: Manifest
    nodes: Nodes
    group: Any
    held: list[set[str]] = field(default_factory=list)

    def look(self) -> list[str]:
        """Collective: find out which node holds what, every byte compared with its digest; what none holds whole."""
        if self.nodes.is_leader:
            with suppress(BadInput):  # without a manifest that can be read, its files may still be good
                if read_manifest(self.path).checkpoint_id != self.manifest.checkpoint_id:
                    shutil.rmtree(self.path, ignore_errors=True)
        dist.barrier(group=self.group)
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
        """Collective: what this rank names is on its node when this returns, what has come compared with its digest.

        Raises:
            TryAgain: it cannot be written here, or has changed on its way.
        """
        wanted = {name: self.manifest.files[name].bytes for name in names}
        failed = fetch_files(self.nodes, self.path, wanted, self.held, self.group)
        if failed is not None:
            raise TryAgain(f"{self.path}: cannot be written ({failed.strerror}): start the same command again")
        come = {
            self.path / name: self.manifest.files[name] for name in wanted if name not in self.held[dist.get_rank()]
        }
        if (wrong := check_contents(self.path, come)) is not None:
            raise TryAgain(f"{self.path}: {wrong}, on its way between nodes: start the same command again")
        self._note(wanted)

    def _note(self, names: Iterable[str]) -> None:
        """Collective: all ranks hear of what each found on its node."""
        found = gather_values(set(names), self.group)
        before = self.held or [set() for _ in found]
        places = self.nodes.places
        self.held = [
            before[rank].union(*(found[other] for other, place in enumerate(places) if place == places[rank]))
            for rank in range(len(found))
        ]


def find_copy(memory: Path, run_dir: Path) -> NodeCopy | None:
    """Collective: the newest copy that nodes still have all files of, and that is not older than the last checkpoint.

    memory: the folder of this node's copies.
    """
    nodes = Nodes.of(memory)
    group = dist.new_group(timeout=world_timeout(), backend="gloo")
    if nodes.is_leader:
        remove_leftovers(memory)
    seen = gather_values(_manifests(memory) if nodes.is_leader else {}, group)
    newest = broadcast_value(max(list_checkpoints(run_dir), default=None))
    manifests = {key: each for found in seen for key, each in found.items()}
    chosen = None
    for name, checkpoint_id in sorted(manifests, reverse=True):
        if chosen is not None or (newest is not None and name < newest):
            break
        path = memory / CHECKPOINT_FOLDER / str(name)
        copy = NodeCopy(path, manifests[name, checkpoint_id], nodes, group)
        lacking = copy.look()
        if not lacking and broadcast_value(_record_is_whole(copy)):
            chosen = copy
        elif dist.get_rank() == 0:
            what = f"{lacking[0]} is on no node" if lacking else "the rollouts that it names are gone"
            _logger.warning("%s: %s; it is left aside", path, what)
    if nodes.is_leader:
        for path in list_checkpoints(memory).values():
            if chosen is None or path != chosen.path:
                shutil.rmtree(path, ignore_errors=True)  # it would take the place of those that come
    if chosen is not None:
        chosen.fetch(name for name in chosen.manifest.files if not name.endswith(_TENSORS))
    return chosen


def _manifests(memory: Path) -> dict[tuple[CheckpointName, str], Manifest]:
    return {(name, manifest.checkpoint_id): manifest for name, manifest in readable_manifests(memory).items()}


def _record_is_whole(copy: NodeCopy) -> bool:
    """Whether what it needs of the run directory is there; rank 0's answer counts."""
    record = needed_files(copy.path, copy.manifest.model_copy(update={"files": {}}))
    return dist.get_rank() != 0 or check_contents(copy.path, record) is None
