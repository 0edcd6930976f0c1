"""Ports for servers that a test starts by number."""

import random
import socket


def free_port() -> int:
    """One that is free, below those that the system gives to whoever asks for any: no other test
    gets it meanwhile."""
    chosen = random.Random()
    while True:
        port = chosen.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """So many, each another."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)
