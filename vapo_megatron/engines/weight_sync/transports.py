"""The ways by which a bucket of weights reaches servers. All end in
engines/inside/strict_loading.py."""

import asyncio
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from typing_extensions import override

from vapo_megatron.collectives import gather_values
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
        """Whether this rank's buckets may be sent."""
        return bool(self.clients)

    @property
    def sent_share(self) -> float | None:
        """Bytes that the last weight sync sent, as a share of the weights' bytes; None where
        weights are always sent whole, and on ranks that send none."""
        return None

    def pair_with(self, ranks: dist.ProcessGroup) -> bool:
        """Collective: whether buckets of own shares can be sent from these tensor-parallel ranks,
        each from its memory to the server's rank of its number. All of them deliver() every bucket
        from then on."""
        return False

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


class RankTransport(Transport):
    """Trainer ranks that take part together. Where each sends from its memory, the server's rank of
    its number reads that."""

    # Whether any of the ranks has a server, as far as this one knows.
    _is_fed = True

    async def _send_from_each(
        self,
        placed: Bucket | None,
        message: dict[str, Any],
        version: int | None,
        ranks: dist.ProcessGroup | None,
    ) -> LoadAnswer:
        """Collective over the trainer ranks, in the order of the server's; None: this one alone."""
        payload = pickle.dumps(message)  # once: a CUDA handle that nobody opens is never freed
        payloads = [payload]
        if ranks is not None:
            payloads = gather_values(payload, ranks)
        loading: asyncio.Future[list[LoadAnswer]] | None = None
        if self.clients:
            loading = asyncio.ensure_future(
                self.each(lambda client: client.send_bucket(payloads, version=version))
            )
        sums: list[int] = []
        if placed is not None and (loading is not None or placed.own_shares):
            sums = await asyncio.to_thread(placed.checksums)
        answer = NOTHING
        has_server = False
        everywhere = [(sums, has_server)]
        try:
            if loading is not None:
                answer = _merged(await loading)
                has_server = True
        finally:
            # No rank may refill its buffer before the server has read it. If the server fails, the
            # others wait here all the same.
            if ranks is not None:
                everywhere = gather_values((sums, has_server), ranks)
                self._is_fed = any(has_server for _, has_server in everywhere)
        if placed is None or loading is None:
            return answer
        if placed.own_shares:
            sums_of_ranks = [sums_of_rank for sums_of_rank, _ in everywhere]
        else:
            sums_of_ranks = [sums] * len(answer.checksums)
        return _compared(answer, [name for name, _ in placed], sums_of_ranks)


class SharedMemoryTransport(RankTransport):
    """Host memory that the server's processes map: of the owner, or for own shares of the trainer
    rank of each one's number. engine_tp: number of the server's ranks."""

    def __init__(self, client: EngineClient | None, engine_tp: int) -> None:
        super().__init__([] if client is None else [client], None)
        self._engine_tp = engine_tp
        self._ranks: dist.ProcessGroup | None = None

    @override
    def pair_with(self, ranks: dist.ProcessGroup) -> bool:
        if ranks.size() != self._engine_tp or current_platform().is_cuda:
            return False
        hosts = gather_values(socket.gethostname(), ranks)
        if len(set(hosts)) == 1:
            self._ranks = ranks
        return self._ranks is not None

    @property
    @override
    def sends(self) -> bool:
        return bool(self.clients) or self._ranks is not None

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        message["path"] = None if placed is None else placed.memory.path
        if placed is not None and placed.own_shares:
            return await self._send_from_each(placed, message, version, self._ranks)
        if not self.clients:
            return NOTHING
        payloads = [pickle.dumps(message)] * self._engine_tp
        return await checked(
            placed, self.each(lambda client: client.send_bucket(payloads, version=version))
        )


class IpcTransport(RankTransport):
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
    def pair_with(self, ranks: dist.ProcessGroup) -> bool:
        if self._group is None:
            return False
        return dist.get_process_group_ranks(self._group) == dist.get_process_group_ranks(ranks)

    @override
    async def begin_session(self) -> None:
        """Same as in Transport; ranks learn whether their server takes part."""
        has_server = False
        try:
            await super().begin_session()
            has_server = bool(self.clients)
        finally:
            if self._group is not None:
                self._is_fed = any(gather_values(has_server, self._group))

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        is_read = bool(self.clients) if self._group is None else self._is_fed
        if placed is not None and is_read:
            message["buffer"] = IpcHandle(placed.buffer)
            # Not the whole device: the next bucket is gathered on another stream meanwhile.
            current_platform().synchronize_stream()
        return await self._send_from_each(placed, message, version, self._group)

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
    answer = _merged(await loading)
    return _compared(answer, names, [sums] * len(answer.checksums))


def _merged(answers: Sequence[LoadAnswer]) -> LoadAnswer:
    """Several servers' answers as one: all problems, the longest time, all ranks' checksums."""
    problems = dict.fromkeys(problem for answer in answers for problem in answer.problems)
    seconds = max(answer.seconds for answer in answers)
    return LoadAnswer(
        list(problems), seconds, [sums for answer in answers for sums in answer.checksums]
    )


def _compared(
    answer: LoadAnswer, names: Sequence[str], sums_of_ranks: Sequence[Sequence[int]]
) -> LoadAnswer:
    """The answer, with a problem for each tensor that did not reach every rank as it was sent.

    If the server reports problems itself, a missing checksum is their consequence and is not
    reported.

    Args:
        answer: of one server, or of several that were sent the same.
        names: of the tensors.
        sums_of_ranks: the checksums that each rank of `answer` was sent.
    """

    def is_damaged(place: int) -> bool:
        if len(answer.checksums) < len(sums_of_ranks):
            return not answer.problems
        for received, sent in zip(answer.checksums, sums_of_ranks, strict=True):
            if place < len(received):
                if received[place] != sent[place]:
                    return True
            elif not answer.problems:
                return True
        return False

    damaged = [name for place, name in enumerate(names) if is_damaged(place)]
    problems = [f"{name} arrived damaged: its checksum is not the sender's" for name in damaged]
    return LoadAnswer(answer.problems + problems, answer.seconds, answer.checksums)
