"""A server whose tensor-parallel ranks are on several nodes: what each node runs of it."""

from dataclasses import dataclass

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput


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
