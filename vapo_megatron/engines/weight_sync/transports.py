"""The ways in which a bucket of weights reaches servers. All end in engines/inside/strict_loading.py, inside them."""

import asyncio
import contextlib
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from typing_extensions import override

from vapo_megatron.engines.client import EngineClient, LoadAnswer
from vapo_megatron.engines.inside.broadcast_group import BroadcastGroup, address_towards, backend_of
from vapo_megatron.engines.inside.bucket_message import Purpose, announce
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, NamedTensors, SharedSlots, pack, packed_size

# Of what torch.multiprocessing.reductions.reduce_tensor gives rebuild_cuda_tensor: the GPU's index in this process.
_DEVICE = 6


class IpcHandle:
    """Stands for a CUDA tensor where something is pickled for an engine, which finds the tensor in its place.

    Sender and engine may number GPUs differently, so that the UUID takes the place of the index; SGLang's processes
    look it up (sglang/srt/utils/patch_torch.py). Its patch of torch is not applied on this side: tensors in host memory
    could then not be sent to other processes any more.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


T = TypeVar("T")

_CPU = torch.device("cpu")

NOTHING = LoadAnswer([], 0.0, [])


class Transport(ABC):
    """One way to one server, or to several that get the same bytes.

    Every rank that feeds them calls begin_session, deliver for each bucket and once without one as the last, then
    end_session, with the same arguments. A bucket that lies in other memory is copied; the copy's memory is the
    trainer's again between sessions.

    Args:
        clients: the owner's, none on the other ranks.
        device: whose memory is sent; None: host memory that processes share.
    """

    def __init__(self, clients: Sequence[EngineClient], device: torch.device | None) -> None:
        self.clients, self._device = tuple(clients), device
        self._slots: DeviceSlots | SharedSlots = SharedSlots() if device is None else DeviceSlots(device)

    @property
    def sends(self) -> bool:
        """Whether bytes of this rank's buckets are sent."""
        return bool(self.clients)

    def serve(self, clients: Sequence[EngineClient]) -> None:
        """Feed these servers from now on, on the owner; without any it only takes part in what several ranks do."""
        self.clients = tuple(clients)

    async def each(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """What every server answers to a call; all are asked at once."""
        return await asyncio.gather(*(call(client) for client in self.clients))

    async def begin_session(self) -> None:
        """Begin the servers' sessions."""
        await self.each(EngineClient.begin_weight_update)

    async def deliver(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """Send a bucket; None ends the weight sync, and a version then marks what is generated from now on.

        The bucket's memory may be overwritten when this returns. On ranks without a client the answer is empty.
        """
        if not self.sends:
            return NOTHING
        placed = bucket
        if bucket is not None and not (isinstance(bucket, Bucket) and self._can_send(bucket)):
            placed = pack(bucket, self._slots.take(0, packed_size(bucket)))
        assert placed is None or isinstance(placed, Bucket)
        return await self._send(placed, announce(placed, purpose, first=first, last=bucket is None), version)

    async def end_session(self) -> None:
        """End the sessions."""
        await self.each(EngineClient.end_weight_update)
        if self._device is not None:
            self._slots.close()

    def close(self) -> None:
        """Give memory and connections back."""
        self._slots.close()

    def _can_send(self, bucket: Bucket) -> bool:
        return bucket.memory.path is not None if self._device is None else bucket.buffer.device == self._device

    @abstractmethod
    async def _send(self, placed: Bucket | None, message: dict[str, Any], version: int | None) -> LoadAnswer:
        """Send bytes that lie in the right memory, with their announcement."""


class SharedMemoryTransport(Transport):
    """Host memory that the server's processes map. engine_tp: ranks of the server."""

    def __init__(self, client: EngineClient | None, engine_tp: int) -> None:
        super().__init__([] if client is None else [client], None)
        self._engine_tp = engine_tp

    @override
    async def _send(self, placed: Bucket | None, message: dict[str, Any], version: int | None) -> LoadAnswer:
        message["path"] = None if placed is None else placed.memory.path
        payloads = [pickle.dumps(message)] * self._engine_tp
        return await _checked(placed, self.each(lambda client: client.send_bucket(payloads, version=version)))


class IpcTransport(Transport):
    """GPU memory whose CUDA IPC handle travels: every rank of the server reads that of the trainer rank on its GPU.

    Args:
        device: this rank's.
        group: of the trainer ranks that share the server's GPUs, the owner first; None where it has one rank.
    """

    def __init__(self, client: EngineClient | None, device: torch.device, group: dist.ProcessGroup | None) -> None:
        super().__init__([] if client is None else [client], device)
        self._group = group

    @property
    @override
    def sends(self) -> bool:
        return True

    @override
    async def _send(self, placed: Bucket | None, message: dict[str, Any], version: int | None) -> LoadAnswer:
        if placed is not None:
            message["buffer"] = IpcHandle(placed.buffer)
            # This stream alone: the next bucket is being gathered on another.
            current_platform().synchronize_stream()
        payload = pickle.dumps(message)
        payloads = [payload]
        if self._group is not None:  # in the order of the server's tensor-parallel ranks
            payloads = [b""] * self._group.size()
            dist.gather_object(payload, payloads if self._group.rank() == 0 else None, group=self._group, group_dst=0)
        answer = NOTHING
        if self.clients:
            answer = await _checked(placed, self.each(lambda client: client.send_bucket(payloads, version=version)))
        if self._group is not None:  # no rank refills its buffer before the server has read it
            dist.barrier(self._group)
        return answer

    @override
    def close(self) -> None:
        super().close()
        current_platform().release_ipc_memory()


class DistributedTransport(Transport):
    """One broadcast from the owner to all ranks of all servers: where no memory is shared.

    Args:
        engine_tp: ranks of each server.
        deadline: seconds until all have met, and for one broadcast.
        device: whose memory is sent: the CPU's, over TCP (gloo), or that of this rank's GPU, from GPU to GPU (NCCL),
            where no server uses it.
    """

    def __init__(
        self, clients: Sequence[EngineClient], engine_tp: int, deadline: float, device: torch.device = _CPU
    ) -> None:
        super().__init__(clients, device)
        self._source, self._engine_tp, self._deadline = device, engine_tp, deadline
        self._group: BroadcastGroup | None = None

    @override
    def serve(self, clients: Sequence[EngineClient]) -> None:
        if tuple(clients) != self.clients:
            self._group = None  # of other servers, or of one that is gone
        super().serve(clients)

    @override
    async def begin_session(self) -> None:
        """See Transport; the first time the two sides meet."""
        if self.clients and self._group is None:
            hosts = [str(urlsplit(client.address.url).hostname) for client in self.clients]
            # One address for all of them: servers elsewhere cannot reach the one that a server of this machine can.
            host = next((address for address in map(address_towards, hosts) if address != "127.0.0.1"), "127.0.0.1")
            size, backend = 1 + self._engine_tp * len(self.clients), backend_of(self._source)
            store = BroadcastGroup.listen(host, size, self._deadline)
            group = _in_daemon(partial(BroadcastGroup, store, 0, size, self._deadline, host, self._source))
            await asyncio.gather(
                *(
                    client.join_broadcast_group(host, store.port, 1 + i * self._engine_tp, size, backend)
                    for i, client in enumerate(self.clients)
                )
            )
            self._group = await group
        await super().begin_session()

    @override
    async def _send(self, placed: Bucket | None, message: dict[str, Any], version: int | None) -> LoadAnswer:
        broadcast = None
        if placed is not None:
            assert self._group is not None
            current_platform().synchronize_stream()  # the broadcast is another thread's, on another stream
            broadcast = _in_daemon(partial(self._group.broadcast, placed.buffer))
        answer = await _checked(placed, self.each(lambda client: client.receive_broadcast(message, version=version)))
        if broadcast is not None:
            try:
                await broadcast
            except RuntimeError as error:
                reason = str(error).partition("\n")[0][:300]
                raise TryAgain(f"weights could not be sent to the engines, one of them is gone: {reason}") from None
        return answer

    @override
    def close(self) -> None:
        super().close()
        self._group = None


def _in_daemon(function: Callable[[], T]) -> "asyncio.Future[T]":
    """What a function returns, from a thread that does not hold up the end of this process, as asyncio's own would:
    should a server refuse, nobody may ever answer the function.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # else a stack trace, if nobody waits

    def run() -> None:
        try:
            settle = partial(future.set_result, function())
        except Exception as error:
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name="vapo-broadcast", daemon=True).start()
    return future


async def _checked(placed: Bucket | None, answers: Awaitable[list[LoadAnswer]]) -> LoadAnswer:
    """The servers' answer to a bucket, and what the checksums say; ours are made while the servers load."""
    loading = asyncio.ensure_future(answers)
    sums = [] if placed is None else await asyncio.to_thread(placed.checksums)
    names = [] if placed is None else [name for name, _ in placed]
    return _compared(_together(await loading), list(zip(names, sums, strict=True)))


def _together(answers: Sequence[LoadAnswer]) -> LoadAnswer:
    """The answers of several servers as one: what any has to say, the longest time, the checksums of all ranks."""
    problems = dict.fromkeys(problem for answer in answers for problem in answer.problems)
    seconds = max(answer.seconds for answer in answers)
    return LoadAnswer(list(problems), seconds, [sums for answer in answers for sums in answer.checksums])


def _compared(answer: LoadAnswer, expected: list[tuple[str, int]]) -> LoadAnswer:
    """The answer, with a problem for each tensor that did not come to every rank of the server as it was sent.

    What the server itself has to say comes first; then a checksum that never came is its consequence and not told of.
    """
    damaged = [
        name
        for i, (name, expected_sum) in enumerate(expected)
        if any(came[i] != expected_sum if i < len(came) else not answer.problems for came in answer.checksums)
    ]
    problems = [f"{name} arrived damaged: its checksum is not the sender's" for name in damaged]
    return LoadAnswer(answer.problems + problems, answer.seconds, answer.checksums)
