"""The ways by which a bucket of weights reaches servers. All end in
engines/inside/strict_loading.py."""

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

from vapo_megatron.engines.inside.broadcast_group import BroadcastGroup, address_towards, backend_of
from vapo_megatron.engines.server.client import EngineClient, LoadAnswer
from vapo_megatron.engines.weight_sync.sent_buckets import SentBuckets
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.bucket import (
    Bucket,
    DeviceSlots,
    NamedTensors,
    Purpose,
    SharedSlots,
    announce,
    pack,
    sum_of_words,
)
from vapo_megatron.weights.changes import NEEDS_WHOLE, Difference

# Position of the GPU's index among the arguments that reduce_tensor makes for rebuild_cuda_tensor
# (torch.multiprocessing).
_DEVICE = 6


class IpcHandle:
    """Pickles a CUDA tensor as a CUDA IPC handle, which an engine unpickles as a tensor.

    Sender and engine may number GPUs differently, so the GPU's UUID replaces its index; SGLang's
    processes look it up (sglang/srt/utils/patch_torch.py). SGLang's patch of torch is not applied
    on this side: it would break sending tensors in host memory to other processes.
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
    """Sends weights to one server, or the same bytes to several.

    Every rank that feeds them calls begin_session(), then deliver() for each bucket and once more
    with None, then end_session(), all with the same arguments. A bucket in other memory is copied;
    the copy's memory is released between sessions.

    Args:
        clients: clients of the servers on the rank that owns them; none on the other ranks.
        device: the device whose memory is sent; None: shared host memory.
    """

    def __init__(self, clients: Sequence[EngineClient], device: torch.device | None) -> None:
        self.clients = tuple(clients)
        self._device = device
        self._slots: DeviceSlots | SharedSlots
        if device is None:
            self._slots = SharedSlots()
        else:
            self._slots = DeviceSlots(device)

    @property
    def sends(self) -> bool:
        """Whether this rank's buckets are sent."""
        return bool(self.clients)

    @property
    def sent_share(self) -> float | None:
        """Bytes that the last weight sync sent, as a share of the weights' bytes; None where
        weights are always sent whole, and on ranks that send none."""
        return None

    def serve(self, clients: Sequence[EngineClient]) -> None:
        """On the owner: feed these servers from now on. Without any, it only takes part in
        collective calls."""
        self.clients = tuple(clients)

    async def each(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Call all servers concurrently and return their answers."""
        return await asyncio.gather(*(call(client) for client in self.clients))

    async def begin_session(self) -> None:
        """Begin the servers' sessions."""
        await self.each(EngineClient.begin_weight_update)

    async def deliver(
        self,
        bucket: NamedTensors | None,
        purpose: Purpose,
        *,
        first: bool,
        version: int | None = None,
    ) -> LoadAnswer:
        """Send a bucket. None ends the weight sync, and a version then marks all later responses.

        The bucket's memory may be overwritten afterwards. The answer is empty on ranks without a
        client.
        """
        if not self.sends:
            return NOTHING
        placed = bucket
        if bucket is not None and not (isinstance(bucket, Bucket) and self._can_send(bucket)):
            placed = pack(bucket, self._slots)
        assert placed is None or isinstance(placed, Bucket)
        message = announce(placed, purpose, first=first, last=bucket is None)
        return await self._send(placed, message, version)

    async def end_session(self) -> None:
        """End the sessions."""
        await self.each(EngineClient.end_weight_update)
        if self._device is not None:
            self._slots.close()

    def close(self) -> None:
        """Release memory and connections."""
        self._slots.close()

    def _can_send(self, bucket: Bucket) -> bool:
        if self._device is None:
            return bucket.memory.path is not None
        return bucket.buffer.device == self._device

    @abstractmethod
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        """Send a bucket in the right memory, with its announcement."""


class SharedMemoryTransport(Transport):
    """Host memory that the server's processes map. engine_tp: number of the server's ranks."""

    def __init__(self, client: EngineClient | None, engine_tp: int) -> None:
        super().__init__([] if client is None else [client], None)
        self._engine_tp = engine_tp

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        message["path"] = None if placed is None else placed.memory.path
        payloads = [pickle.dumps(message)] * self._engine_tp
        return await _checked(
            placed, self.each(lambda client: client.send_bucket(payloads, version=version))
        )


class IpcTransport(Transport):
    """CUDA IPC handles: every rank of the server reads the memory of the trainer rank on its GPU.

    Args:
        device: this rank's GPU.
        group: the trainer ranks that share the server's GPUs, the owner first; None for a server of
            one rank.
    """

    def __init__(
        self, client: EngineClient | None, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__([] if client is None else [client], device)
        self._group = group

    @property
    @override
    def sends(self) -> bool:
        return True

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        if placed is not None:
            message["buffer"] = IpcHandle(placed.buffer)
            # Not the whole device: the next bucket is gathered on another stream meanwhile.
            current_platform().synchronize_stream()
        payload = pickle.dumps(message)
        payloads = [payload]
        if self._group is not None:  # in the order of the server's tensor-parallel ranks
            payloads = [b""] * self._group.size()
            dist.gather_object(
                payload,
                payloads if self._group.rank() == 0 else None,
                group=self._group,
                group_dst=0,
            )
        answer = NOTHING
        if self.clients:
            answer = await _checked(
                placed, self.each(lambda client: client.send_bucket(payloads, version=version))
            )
        if self._group is not None:
            # No rank may refill its buffer before the server has read it.
            dist.barrier(self._group)
        return answer

    @override
    def close(self) -> None:
        super().close()
        current_platform().release_ipc_memory()


class DistributedTransport(Transport):
    """One broadcast from the owner to all ranks of all servers, if no memory can be shared.

    Args:
        clients: see Transport.
        engine_tp: number of ranks of each server.
        deadline: seconds for the ranks to meet, and for one broadcast.
        device: the device whose memory is sent: the CPU (gloo, TCP), or this rank's GPU if no
            server uses it (NCCL).
        only_changes: send the words that changed since the last sync, where the servers can apply
            them (rollout.sync.only_changes).
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        engine_tp: int,
        deadline: float,
        device: torch.device = _CPU,
        only_changes: bool = False,
    ) -> None:
        super().__init__(clients, device)
        self._source = device
        self._engine_tp = engine_tp
        self._deadline = deadline
        self._group: BroadcastGroup | None = None
        self._sent = SentBuckets() if only_changes else None
        self._sent_bytes = 0
        self._whole_bytes = 0

    @property
    @override
    def sent_share(self) -> float | None:
        if self._sent is None or not self._whole_bytes:
            return None
        return self._sent_bytes / self._whole_bytes

    @override
    def serve(self, clients: Sequence[EngineClient]) -> None:
        if tuple(clients) != self.clients:
            self._group = None  # it belongs to other servers, or to one that is gone
            if self._sent is not None:
                self._sent.forget()
        super().serve(clients)

    @override
    async def begin_session(self) -> None:
        """Same as in Transport; both sides meet at the first call."""
        if self.clients and self._group is None:
            hosts = [str(urlsplit(client.address.url).hostname) for client in self.clients]
            # One address that all of them can reach: 127.0.0.1 only if every server is on this
            # machine.
            host = next(
                (address for address in map(address_towards, hosts) if address != "127.0.0.1"),
                "127.0.0.1",
            )
            size = 1 + self._engine_tp * len(self.clients)
            backend = backend_of(self._source)
            store = BroadcastGroup.listen(host, size, self._deadline)
            group = _in_daemon(
                partial(BroadcastGroup, store, 0, size, self._deadline, host, self._source)
            )
            joins = [
                client.join_broadcast_group(
                    host, store.port, 1 + i * self._engine_tp, size, backend
                )
                for i, client in enumerate(self.clients)
            ]
            await asyncio.gather(*joins)
            self._group = await group
        self._sent_bytes = 0
        self._whole_bytes = 0
        await super().begin_session()

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        if placed is None:
            return await _checked(None, self._broadcast(message, None, version))
        if self._sent is None or message["purpose"] != "load":
            return await _checked(placed, self._broadcast(message, placed.buffer, version))
        self._whole_bytes += placed.buffer.numel()
        changed = self._sent.changes_to(placed)
        if changed is not None:
            answer = await self._send_changes(placed, message, version, *changed)
            if NEEDS_WHOLE not in answer.problems:
                self._keep(placed, answer, whole=False)
                return answer
            self._sent.was_refused(placed)
        message = message | {"changes_follow": True}
        answer = await _checked(placed, self._broadcast(message, placed.buffer, version))
        self._keep(placed, answer, whole=True)
        return answer

    def _keep(self, placed: Bucket, answer: LoadAnswer, whole: bool) -> None:
        assert self._sent is not None
        if answer.problems:
            self._sent.drop(placed)
        else:
            self._sent.keep(placed, whole)

    async def _send_changes(
        self,
        placed: Bucket,
        message: dict[str, Any],
        version: int | None,
        changes: torch.Tensor,
        difference: Difference,
    ) -> LoadAnswer:
        message = message | {"difference": difference}
        name = f"the changes of {placed[0][0]} to {placed[-1][0]}"
        answers = self._broadcast(message, changes, version)
        return await _checked_sums([name], lambda: [int(sum_of_words(changes))], answers)

    async def _broadcast(
        self, message: dict[str, Any], buffer: torch.Tensor | None, version: int | None
    ) -> list[LoadAnswer]:
        """The servers' answers to a message, whose bytes (if any) are broadcast meanwhile."""
        broadcast = None
        if buffer is not None:
            assert self._group is not None
            self._sent_bytes += buffer.numel()
            # The broadcast runs in another thread, on another stream.
            current_platform().synchronize_stream()
            broadcast = _in_daemon(partial(self._group.broadcast, buffer))
        answers = await self.each(lambda client: client.receive_broadcast(message, version=version))
        if broadcast is not None:
            try:
                await broadcast
            except RuntimeError as error:
                reason = str(error).partition("\n")[0][:300]
                raise TryAgain(
                    f"weights could not be sent to the engines, one of them is gone: {reason}"
                ) from None
        return answers

    @override
    def close(self) -> None:
        super().close()
        self._group = None


def _in_daemon(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs a function in a daemon thread.

    If a server refuses, the function may never return, and one of asyncio's own threads would then
    keep this process from exiting.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # Reads the exception; asyncio would otherwise print a stack trace if nobody waits for the
    # future.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def run() -> None:
        try:
            settle = partial(future.set_result, function())
        except Exception as error:
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name="vapo-broadcast", daemon=True).start()
    return future


async def _checked(placed: Bucket | None, answers: Awaitable[list[LoadAnswer]]) -> LoadAnswer:
    """The servers' answer to a bucket, with a problem for each tensor whose checksum differs."""
    if placed is None:
        return _merged(await answers)
    return await _checked_sums([name for name, _ in placed], placed.checksums, answers)


async def _checked_sums(
    names: Sequence[str],
    checksums: Callable[[], Sequence[int]],
    answers: Awaitable[list[LoadAnswer]],
) -> LoadAnswer:
    """The same for anything that was sent and has these checksums.

    They are computed here while the servers load.
    """
    loading = asyncio.ensure_future(answers)
    sums = await asyncio.to_thread(checksums)
    return _compared(_merged(await loading), list(zip(names, sums, strict=True)))


def _merged(answers: Sequence[LoadAnswer]) -> LoadAnswer:
    """Several servers' answers as one: all problems, the longest time, all ranks' checksums."""
    problems = dict.fromkeys(problem for answer in answers for problem in answer.problems)
    seconds = max(answer.seconds for answer in answers)
    return LoadAnswer(
        list(problems), seconds, [sums for answer in answers for sums in answer.checksums]
    )


def _compared(answer: LoadAnswer, expected: list[tuple[str, int]]) -> LoadAnswer:
    """The answer, with a problem for each tensor that did not reach every rank as it was sent.

    If the server reports problems itself, a missing checksum is their consequence and is not
    reported.
    """

    def is_damaged(place: int, expected_checksum: int) -> bool:
        for received in answer.checksums:
            if place < len(received):
                if received[place] != expected_checksum:
                    return True
            elif not answer.problems:
                return True
        return False

    damaged = [name for i, (name, checksum) in enumerate(expected) if is_damaged(i, checksum)]
    problems = [f"{name} arrived damaged: its checksum is not the sender's" for name in damaged]
    return LoadAnswer(answer.problems + problems, answer.seconds, answer.checksums)
