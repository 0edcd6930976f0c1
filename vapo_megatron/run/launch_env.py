"""This process's place among the ranks of a run, as assigned by torchrun or Slurm."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from vapo_megatron.errors import BadInput, TryAgain


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among all ranks, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str


def place_from_environment(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place that torchrun or srun gave a process, by default this one; None where it was
    started by hand.

    Raises:
        BadInput: a variable is not there, is no number, or names a place where ranks cannot meet.
        TryAgain: the name server does not answer.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        method = "env://"
        environment = {"LOCAL_RANK": "0", **environment}
    elif (
        _count("SLURM_NTASKS", {"SLURM_NTASKS": "1", **environment}) > 1
        and "SLURM_PROCID" in environment
    ):
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        method = "tcp://{MASTER_ADDR}:{MASTER_PORT}"
    else:
        return None
    rank, world_size, local_rank = (_count(name, environment) for name in names)
    if rank >= world_size:
        raise BadInput(
            f"{names[0]}={rank} with {names[1]}={world_size}: ranks count from 0, expected one "
            "below it"
        )
    _check_meeting_place(environment)
    return RankPlace(rank, world_size, local_rank, method.format_map(environment))


def _check_meeting_place(environment: Mapping[str, str]) -> None:
    address = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT")
    if not address or not port:
        raise BadInput(
            "MASTER_ADDR and MASTER_PORT are not set: several ranks were started and need a place "
            "to meet; torchrun sets both, else export them where the ranks are started"
        )
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInput(
            f"MASTER_PORT is {port!r}, expected a number from 1 to 65535: a free port of {address}"
        )
    try:
        socket.getaddrinfo(address, int(port))
    except (socket.gaierror, UnicodeError) as error:
        is_temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        kind = TryAgain if is_temporary else BadInput
        raise kind(
            f"MASTER_ADDR={address}: {node_name()} knows no such host "
            f"({getattr(error, 'strerror', error)}): give the name or address of rank 0's node"
        ) from None


def _count(name: str, environment: Mapping[str, str]) -> int:
    value = environment.get(name)
    if value is None or not value.isdecimal():
        raise BadInput(
            f"{name} is {'not set' if value is None else repr(value)}, expected a number: torchrun "
            "and srun set it; outside of them unset RANK, WORLD_SIZE and the variables of SLURM"
        )
    return int(value)


def node_name() -> str:
    """The name that Slurm knows this node by, else its host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
