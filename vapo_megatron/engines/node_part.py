"""A server whose tensor-parallel ranks are on several nodes: what each node runs of it."""

import random
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput, TryAgain


@dataclass(frozen=True)
class NodePart:
    """One node's part of a server.

    Attributes:
        index: of the node. The first one's part answers requests; the others tell of their own processes alone.
        of: nodes.
        meeting: host:port of the first node, free there, where the parts meet; empty where there is one.
    """

    index: int = 0
    of: int = 1
    meeting: str = ""

    @property
    def leads(self) -> bool:
        """Whether requests come to this part."""
        return self.index == 0

    def arguments(self) -> dict[str, object]:
        """Of SGLang."""
        return {} if self.of == 1 else {"nnodes": self.of, "node_rank": self.index, "dist_init_addr": self.meeting}


WHOLE = NodePart()


def part_of_ranks(rank: int, tp: int, node_gpus: int) -> NodePart | None:
    """The part that a rank owns where each `tp` ranks share their GPUs with one server; None where it owns none.

    node_gpus: GPUs of a node, and ranks on it.
    """
    here = min(tp, node_gpus)
    return None if rank % here else NodePart(rank % tp // here, tp // here)


def not_replaced(config: RolloutConfig) -> RolloutConfig:
    """The config of a server on several nodes: the first failure of a part is the end of all of them.

    A part cannot join the others again, which wait for its processes that are gone.
    """
    return config.model_copy(update={"health": config.health.model_copy(update={"max_failures": 0})})


def check_nodes(tp: int, part: NodePart) -> None:
    """Raises BadInput where a server's ranks cannot be shared out like this."""
    if part.index >= part.of:
        raise BadInput(f"--node {part.index} of --nodes {part.of}: they are counted from 0")
    if tp % part.of:
        raise BadInput(f"--nodes {part.of} does not divide rollout.tp={tp}: each node has as many GPUs of an engine")
    if part.of > 1 and not part.meeting:
        raise BadInput(f"--nodes {part.of} without --meet: give host:port of the first node, the same on all of them")
    if part.of == 1 and part.meeting:
        raise BadInput(f"--meet {part.meeting} without --nodes: say how many nodes share the engine, or leave it out")
    host, _, port = part.meeting.rpartition(":")
    if part.meeting and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise BadInput(f"--meet {part.meeting} is not of the form host:port: give those of the first node")


def check_engine_size(tp: int, node_gpus: int, gpus: int) -> None:
    """Raises BadInput where engines of so many GPUs cannot share those of a run: a part of a node, or whole ones."""
    if node_gpus % tp and (tp % node_gpus or gpus % tp):
        raise BadInput(
            f"rollout.tp={tp} neither divides the {node_gpus} GPUs of a node nor is it a number of nodes that "
            f"{gpus} GPUs can be shared out into: choose a divisor, or a multiple"
        )


# SGLang 0.5.23 beside its server's port, and beside dist_init_addr's, where parts of a server's GPUs attend to requests
# of their own (srt/server_args.py: PortArgs, srt/managers/data_parallel_controller.py: _broadcast_worker_ports).
_HANDSHAKE, _DERIVED = 13, tuple(range(1, 7))
BESIDE_SERVER = (_HANDSHAKE, *(233 + port for port in (0, *_DERIVED)))
BESIDE_MEETING = (*_DERIVED, _HANDSHAKE)

# The kernel hands no process a port below its own range by chance: one that is free there stays so until it is taken.
_LOWEST, _HIGHEST, _KERNELS_OWN = 20480, 65536, Path("/proc/sys/net/ipv4/ip_local_port_range")
# What lies beside two multiples of this is never the same: servers that start at once differ in all ports or in none.
_STRIDE = 512


def free_port(beside: Sequence[int] = (), candidates: Iterable[int] | None = None) -> int:
    """A port that is free now, as are those at these distances above it.

    candidates: to be tried in turn; None: some below the range that the kernel hands out.

    Raises:
        TryAgain: there is none.
    """
    for port in _some(_STRIDE if beside else 1) if candidates is None else candidates:
        with ExitStack() as taken:
            if all(_take(port + distance, taken) for distance in (0, *beside)):
                return port
    others = f" together with those at {list(beside)} above it" if beside else ""
    raise TryAgain(f"no port of this machine is free{others}: end other servers")


def _take(port: int, taken: ExitStack) -> bool:
    held = taken.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        held.bind(("", port))
    except OSError:
        return False
    return True


def _some(stride: int) -> list[int]:
    try:
        end = int(_KERNELS_OWN.read_text().split()[0])
    except (OSError, ValueError):
        end = _HIGHEST
    ports = range(_LOWEST, (end if end > _LOWEST + 8 * _STRIDE else _HIGHEST) - _STRIDE, stride)
    return random.SystemRandom().sample(ports, len(ports))
