"""Ports for servers, also with those that SGLang takes beside them."""

import random
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from vapo_megatron.errors import TryAgain

# SGLang 0.5.23 beside its server's port, where parts of a server's GPUs attend to requests of their own
# (srt/server_args.py: PortArgs, srt/managers/data_parallel_controller.py: _broadcast_worker_ports).
BESIDE_SERVER = (13, *range(233, 240))

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
