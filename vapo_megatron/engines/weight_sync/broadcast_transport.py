"""Weights reach servers with which no memory is shared by a broadcast, whole or by what changed."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from typing_extensions import override

from vapo_megatron.engines.inside.broadcast_group import BroadcastGroup, address_towards, backend_of
from vapo_megatron.engines.server.client import EngineClient, LoadAnswer
from vapo_megatron.engines.weight_sync.sent_buckets import SentBuckets
from vapo_megatron.engines.weight_sync.transports import (
    Transport,
    all_or_none,
    checked,
    checked_sums,
)
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.bucket import Bucket, sum_of_words
from vapo_megatron.weights.changes import NEEDS_WHOLE, Difference

T = TypeVar("T")

_CPU = torch.device("cpu")


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
            await all_or_none(joins)
            self._group = await group
        self._sent_bytes = 0
        self._whole_bytes = 0
        await super().begin_session()

    @override
    async def _send(
        self, placed: Bucket | None, message: dict[str, Any], version: int | None
    ) -> LoadAnswer:
        if placed is None:
            return await checked(None, self._broadcast(message, None, version))
        if self._sent is None or message["purpose"] != "load":
            return await checked(placed, self._broadcast(message, placed.buffer, version))
        self._whole_bytes += placed.buffer.numel()
        changed = self._sent.changes_to(placed)
        if changed is not None:
            answer = await self._send_changes(placed, message, version, *changed)
            if NEEDS_WHOLE not in answer.problems:
                self._keep(placed, answer, whole=False)
                return answer
            self._sent.was_refused(placed)
        message = message | {"changes_follow": True}
        answer = await checked(placed, self._broadcast(message, placed.buffer, version))
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
        return await checked_sums([name], lambda: [int(sum_of_words(changes))], answers)

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
