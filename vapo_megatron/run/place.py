"""This process's place among the ranks of a run, as torchrun or Slurm gave it."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from vapo_megatron.errors import BadInput


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among all ranks, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str


def place_from_environment(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place that torchrun or srun gave a process, by default this one; None where it was started by hand.

    Raises:
        BadInput: Slurm started several tasks and nothing says where rank 0 listens, or a variable is no number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return RankPlace(
            _count("RANK", environment),
            _count("WORLD_SIZE", environment),
            _count("LOCAL_RANK", {"LOCAL_RANK": "0", **environment}),
            "env://",
        )
    if _count("SLURM_NTASKS", {"SLURM_NTASKS": "1", **environment}) > 1 and "SLURM_PROCID" in environment:
        address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
        if not address or not port:
            raise BadInput(
                "MASTER_ADDR and MASTER_PORT are not set: Slurm started several tasks and they need a place to meet; "
                "export both in the batch script"
            )
        return RankPlace(
            _count("SLURM_PROCID", environment),
            _count("SLURM_NTASKS", environment),
            _count("SLURM_LOCALID", environment),
            f"tcp://{address}:{port}",
        )
    return None


def _count(name: str, environment: Mapping[str, str]) -> int:
    found = environment.get(name)
    if found is None or not found.isdecimal():
        raise BadInput(
            f"{name} is {'not set' if found is None else repr(found)}, expected a number: torchrun and srun set it; "
            "outside of them unset RANK, WORLD_SIZE and the variables of SLURM"
        )
    return int(found)


def node_name() -> str:
    """The name that Slurm knows this node by, else its host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
