"""A process group of one trainer rank and the ranks of some servers, apart from every other group of either.

torch.distributed keeps one world a process; these groups are made of its parts directly. With gloo bytes go through
host memory and TCP, with NCCL from GPU to GPU: it refuses two ranks on one GPU, so it is for engines whose GPUs the
trainer does not use.
"""

import os
import socket
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

Backend = Literal["gloo", "nccl"]


class BroadcastGroup:
    """Rank 0 sends, the others receive.

    Args:
        store: where the ranks meet; see listen() and connect().
        rank: of this process.
        size: ranks in all.
        deadline: seconds for one operation.
        host: the address of this machine under which the others reach it; NCCL finds its own.
        device: of the buffers: the CPU on all ranks (gloo), or each rank's GPU (NCCL).
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, deadline: float, host: str, device: torch.device
    ) -> None:
        self._store, self.device = store, device
        if backend_of(device) == "nccl":
            with torch.cuda.device(device):  # the caller may be a thread that knows of no device yet
                self._group: Any = _nccl(store, rank, size, deadline)
        else:
            self._group = _gloo(store, rank, size, deadline, host)

    @staticmethod
    def listen(host: str, size: int, deadline: float) -> dist.TCPStore:
        """Open the meeting place on a free port of an address of this machine; returns at once."""
        return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline))

    @staticmethod
    def connect(host: str, port: int, size: int, deadline: float) -> dist.TCPStore:
        """Reach the one that rank 0 opened."""
        return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=deadline))

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Bring rank 0's bytes (uint8 [n], contiguous, on `device`) to all others; returns when they are there.

        Raises:
            RuntimeError: another rank is gone, or the deadline has passed. The group is of no more use then.
        """
        if backend_of(self.device) == "gloo":
            self._group.broadcast(buffer, root=0).wait()
            return
        with torch.cuda.device(self.device):
            self._group.broadcast(buffer, root=0).wait()
            torch.cuda.synchronize()


def backend_of(device: torch.device) -> Backend:
    """What moves bytes that lie on a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def address_towards(host: str) -> str:
    """The address of this machine that faces a host; its own name may stand for 127.0.1.1. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)
        return str(route.getsockname()[0])


def _gloo(store: dist.Store, rank: int, size: int, deadline: float, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline)
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, deadline: float) -> Any:
    """Blocking: a rank that is gone is an error in this group's caller, instead of the end of its process."""
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"  # read when a group is made, and by no other way to be said
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(_BLOCKING)
        if before is not None:
            os.environ[_BLOCKING] = before


_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
