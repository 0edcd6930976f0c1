"""A process group of one trainer rank and the ranks of one server, apart from every other group of either.

torch.distributed keeps one world a process; these groups are made of its parts directly. Bytes go through host memory
and TCP (gloo): NCCL refuses two ranks on one GPU, which trainer and engine share.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


class BroadcastGroup:
    """Rank 0 sends, the others receive.

    Args:
        store: where the ranks meet; see listen() and connect().
        rank: of this process.
        size: ranks in all.
        deadline: seconds for one operation.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: float) -> None:
        self._store = store
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline))

    @staticmethod
    def listen(host: str, size: int, deadline: float) -> dist.TCPStore:
        """Open the meeting place on a free port of an address of this machine; returns at once."""
        return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline))

    @staticmethod
    def connect(host: str, port: int, size: int, deadline: float) -> dist.TCPStore:
        """Reach the one that rank 0 opened."""
        return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=deadline))

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Bring rank 0's bytes (uint8 [n], contiguous, on the CPU) to all others; returns when they are sent."""
        self._group.broadcast(buffer, root=0).wait()  # type: ignore[attr-defined]
