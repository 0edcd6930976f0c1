"""Two hosts on this machine: network namespaces that see each other alone. Needs root."""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NEWNET = 0x40000000
_NEWUTS = 0x04000000
_NEWNS = 0x00020000
_PRIVATE = 0x00040000 | 0x00004000  # MS_PRIVATE, MS_REC
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface."""

    name: str
    address: str
    interface: str

    def enter(self) -> None:
        """Put this thread, and all that it starts from now on, onto the host."""
        with Path("/run/netns", self.name).open("rb") as namespace:
            _check(_libc.setns(namespace.fileno(), _NEWNET))
        _check(_libc.unshare(_NEWUTS | _NEWNS))
        # Hosts share no memory, by which SGLang tells them apart.
        _check(_libc.mount(None, b"/", None, _PRIVATE, None))
        _check(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))
        socket.sethostname(self.name)
        os.environ |= {
            "GLOO_SOCKET_IFNAME": self.interface,
            "MASTER_ADDR": self.address.rpartition(".")[0] + ".1",
        }


def missing() -> str:
    """Why this machine cannot have two hosts; empty where it can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"vapo-{os.getpid()}-try"
    found = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if found.returncode:
        return f"no network namespaces here: {found.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """10.213.<n>.1 and .2; they are gone at the end, with the interfaces between them."""
    number = os.getpid() % 250
    hosts = tuple(
        Host(f"vapo-{os.getpid()}-{i}", f"10.213.{number}.{i}", f"veth{i}") for i in (1, 2)
    )
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        first, second = hosts
        _ip(
            "link",
            "add",
            first.interface,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            "name",
            second.interface,
            "netns",
            second.name,
        )
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
