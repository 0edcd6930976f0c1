"""The ways by which a bucket of weights reaches servers. All end in
engines/inside/strict_loading.py."""

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from typing_extensions import override

from vapo_megatron.engines.server.client import EngineClient, LoadAnswer
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.bucket import (
    Bucket,
    DeviceSlots,
    NamedTensors,
    Purpose,
    SharedSlots,
    announce,
    pack,
)

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
        """Call all servers concurrently and return their answers. If a call fails, the others are
        cancelled, as a later call must not find them still running."""
        return await all_or_none([call(client) for client in self.clients])

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
        return await checked(
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
        try:
            if self.clients:
                answer = await checked(
                    placed, self.each(lambda client: client.send_bucket(payloads, version=version))
                )
        finally:
            # No rank may refill its buffer before the server has read it. If the server fails, the
            # others wait here all the same.
            if self._group is not None:
                dist.barrier(self._group)
        return answer

    @override
    def close(self) -> None:
        super().close()
        current_platform().release_ipc_memory()


async def all_or_none(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of concurrent calls; if one fails, the others have ended when its error is
    raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def checked(placed: Bucket | None, answers: Awaitable[list[LoadAnswer]]) -> LoadAnswer:
    """The servers' answer to a bucket, with a problem for each tensor whose checksum differs."""
    if placed is None:
        return _merged(await answers)
    return await checked_sums([name for name, _ in placed], placed.checksums, answers)


async def checked_sums(
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
