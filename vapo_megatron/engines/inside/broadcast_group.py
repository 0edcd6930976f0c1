"""A process group of one trainer rank and the ranks of some servers, independent of all other
groups.

torch.distributed allows one world per process, so these groups are built from its parts. gloo moves
bytes through host memory and TCP; NCCL moves them from GPU to GPU but refuses two ranks on one GPU,
so it is used for engines whose GPUs the trainer does not use.
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
        rank: this process's rank.
        size: number of ranks.
        deadline: seconds for one operation.
        host: address under which the others reach this machine; NCCL finds one by itself.
        device: device of the buffers: the CPU on all ranks (gloo), or each rank's GPU (NCCL).
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        deadline: float,
        host: str,
        device: torch.device,
    ) -> None:
        self._store = store
        self.device = device
        if backend_of(device) == "nccl":
            # The caller may be a thread that knows of no device yet
            with torch.cuda.device(device):
                self._group: Any = _nccl(store, rank, size, deadline)
        else:
            self._group = _gloo(store, rank, size, deadline, host)

    @staticmethod
    def listen(host: str, size: int, deadline: float) -> dist.TCPStore:
        """Open a store on a free port of this machine's address; returns at once."""
        return dist.TCPStore(
            host,
            0,
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline),
        )

    @staticmethod
    def connect(host: str, port: int, size: int, deadline: float) -> dist.TCPStore:
        """Connect to the store that rank 0 opened."""
        return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=deadline))

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Broadcast rank 0's bytes (uint8 [n], contiguous, on `device`); returns once they have
        arrived.

        Raises:
            RuntimeError: another rank is gone, or the deadline has passed. The group is broken
                then.
        """
        if backend_of(self.device) == "gloo":
            self._group.broadcast(buffer, root=0).wait()
            return
        with torch.cuda.device(self.device):
            self._group.broadcast(buffer, root=0).wait()
            torch.cuda.synchronize()


def backend_of(device: torch.device) -> Backend:
    """The backend for buffers on a device."""
    if device.type == "cuda":
        return "nccl"
    return "gloo"


def address_towards(host: str) -> str:
    """This machine's address on the route to a host; its own name may resolve to 127.0.1.1. Nothing
    is sent."""
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
    """Blocking: if a rank is gone, the caller gets an error instead of its process being ended."""
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"  # read when a group is made; there is no other way to set it
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(_BLOCKING)
        if before is not None:
            os.environ[_BLOCKING] = before


_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
