"""Free ports for servers, together with the further ports that SGLang derives from them."""

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from vapo_megatron.errors import TryAgain

# SGLang 0.5.23 beside its server's port, where parts of a server's GPUs attend to requests of their own
# (srt/server_args.py: PortArgs, srt/managers/data_parallel_controller.py: _broadcast_worker_ports).
BESIDE_SERVER = (13, *range(233, 240))

# Below Linux' usual range of ports that processes get by chance (32768 and above): one that is free stays so.
_FIRST, _END = 20480, 32256
# The ports of two multiples of this never overlap: servers that start at once differ in all ports or in none.
_STRIDE = 512


def free_port(beside: Sequence[int] = (), candidates: Sequence[int] = ()) -> int:
    """A free port such that those at the distances `beside` above it are free too. candidates: ports to try in turn.

    Raises:
        TryAgain: there is none.
    """
    ports = range(_FIRST, _END, _STRIDE if beside else 1)
    for port in candidates or random.SystemRandom().sample(ports, len(ports)):
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
