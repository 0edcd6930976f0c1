"""Ranks that feed one engine together, each from the memory of its GPU, while the engine fails."""

import asyncio
import pickle
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from typing_extensions import override

from vapo_megatron.engines.server.client import LoadAnswer
from vapo_megatron.engines.weight_sync import transports
from vapo_megatron.engines.weight_sync.session import EngineLost, WeightSync
from vapo_megatron.engines.weight_sync.transports import IpcTransport
from vapo_megatron.errors import TryAgain
from vapo_megatron.weights.bucket import DeviceSlots, pack

DEADLINE = timedelta(seconds=30)


class Server:
    """Dies at the first bucket, and takes what comes later."""

    def __init__(self) -> None:
        self.buckets: list[list[Any]] = []

    async def _request(self, *_: Any) -> None:
        pass

    _call = _request

    async def send_bucket(self, payloads: Sequence[bytes], *, version: int | None) -> LoadAnswer:
        self.buckets.append([pickle.loads(payload)["last"] for payload in payloads])
        if len(self.buckets) == 1:
            raise TryAgain("the server is gone")
        return LoadAnswer([], 0.0, [])


class Taking(Server):
    """Takes every bucket."""

    @override
    async def send_bucket(self, payloads: Sequence[bytes], *, version: int | None) -> LoadAnswer:
        return LoadAnswer([], 0.0, [])


def feed_a_server_that_dies() -> list[list[Any]]:
    """What the owner's server was given of buckets without tensors, which need no GPU."""
    group = dist.new_group([0, 1], timeout=DEADLINE, backend="gloo")
    server = Server()
    clients: Any = [server] if dist.get_rank() == 0 else []
    transport = IpcTransport(None, torch.device("cpu"), group)
    transport.serve(clients)
    for is_first in (True, False):
        send = transport.deliver(None, "load", first=is_first, version=1)
        if is_first and clients:
            with pytest.raises(TryAgain, match="the server is gone"):
                asyncio.run(send)
            transport.serve(())  # as a weight sync does, which then ends this one's buckets
        else:
            asyncio.run(send)
    transport.serve(clients)  # it was started again
    asyncio.run(transport.deliver(None, "load", first=True, version=1))
    return server.buckets


class CountedHandle:
    """Stands for a CUDA handle: each time it is pickled a handle is made, which holds its memory
    until somebody opens it."""

    made = 0

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        CountedHandle.made += 1
        return str, ("handle",)


def handles_made(fails: bool) -> list[int]:
    """Of each bucket of a session, and of the next session; the server is gone from the first
    bucket on, where it fails."""
    transports.IpcHandle = CountedHandle  # type: ignore[assignment, misc]
    group = dist.new_group([0, 1], timeout=DEADLINE, backend="gloo")
    transport = IpcTransport(None, torch.device("cpu"), group)
    server: Any = Server() if fails else Taking()
    clients = [server] if dist.get_rank() == 0 else []
    transport.serve(clients)
    bucket = pack([("weight", torch.ones(8))], DeviceSlots(torch.device("cpu")))
    counts = []
    for number in range(4):
        if number in (0, 3):
            asyncio.run(transport.begin_session())
        CountedHandle.made = 0
        send = transport.deliver(bucket, "load", first=not number, version=1)
        if fails and clients and not number:
            with pytest.raises(TryAgain):
                asyncio.run(send)
            transport.serve(())
        else:
            asyncio.run(send)
        counts.append(CountedHandle.made)
    return counts


@pytest.mark.parametrize(("fails", "counts"), [(False, [1, 1, 1, 1]), (True, [1, 0, 0, 0])])
def test_a_handle_is_made_once_and_only_for_a_server(fails: bool, counts: list[int]) -> None:
    """Memory of a handle that nobody opens is never freed."""
    assert run_ranks(2, handles_made, fails, deadline=120) == [counts, counts]


class Pausing:
    """A client whose server is gone, or has not answered yet."""

    address = SimpleNamespace(url="http://host:1")
    _session = None  # of connections, to close

    def __init__(self, is_gone: bool) -> None:
        self.is_gone = is_gone
        self.waiting = 0

    async def pause(self, mode: str) -> None:
        if self.is_gone:
            raise TryAgain("the server is gone")
        self.waiting += 1
        try:
            await asyncio.sleep(DEADLINE.total_seconds())
        finally:
            self.waiting -= 1


def test_no_call_outlives_the_sync_that_a_server_failed() -> None:
    """It would go on during the next sync, and pause or resume its server there."""
    clients: Any = [Pausing(is_gone=False), Pausing(is_gone=True)]
    transport = IpcTransport(None, torch.device("cpu"), None)
    transport.serve(clients)
    with WeightSync(transport) as sync:
        with pytest.raises(EngineLost, match="the server is gone"):
            sync.load([], 1)
        assert [client.waiting for client in clients] == [0, 0]


def test_a_failing_server_does_not_hold_up_its_ranks() -> None:
    owner, other = run_ranks(2, feed_a_server_that_dies, deadline=120)
    assert owner == [[True, True]] * 2 and other == []
