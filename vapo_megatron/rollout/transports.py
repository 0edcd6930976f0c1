"""The ways in which a bucket of weights reaches one server. All end in rollout/strict_loading.py, inside it."""

import asyncio
import pickle
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from urllib.parse import urlsplit

import torch

from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.broadcast_group import BroadcastGroup
from vapo_megatron.rollout.client import EngineClient, LoadAnswer
from vapo_megatron.rollout.disk_weights import write_tensors
from vapo_megatron.rollout.weight_bucket import Purpose, announce
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, NamedTensors, SharedSlots, checksums, pack, packed_size

# In the order of the server's tensor-parallel ranks; None everywhere but on the server's owner.
Gather = Callable[[bytes], list[bytes] | None]

NOTHING = LoadAnswer([], 0.0, [])


class Transport(ABC):
    """One way to one server.

    Every rank that feeds the server calls open, send for each bucket and once without one as the last, then shut, with
    the same arguments. client is the owner's, None on the others.
    """

    def __init__(self, client: EngineClient | None) -> None:
        self.client = client

    async def open(self) -> None:
        """Begin the server's session."""
        if self.client is not None:
            await self.client.begin_weight_update()

    @abstractmethod
    async def send(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """Hand over a bucket; None ends the hand-over, and a version then marks what is generated from now on.

        The bucket's memory may be overwritten when this returns. On ranks without a client the answer is empty.
        """

    async def shut(self) -> None:
        """End the session."""
        if self.client is not None:
            await self.client.end_weight_update()

    @abstractmethod
    def close(self) -> None:
        """Give memory and connections back."""


class SharedMemoryTransport(Transport):
    """Host memory that the server's processes map: the bucket's own where it lies in such memory, else a copy."""

    def __init__(self, client: EngineClient | None, engine_tp: int) -> None:
        super().__init__(client)
        self._engine_tp = engine_tp
        self._slots: SharedSlots | None = None

    async def send(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """See Transport."""
        if self.client is None:
            return NOTHING
        placed = None if bucket is None else self._placed(bucket)
        message = announce(placed, purpose, first=first, last=bucket is None)
        message["path"] = None if placed is None else placed.memory.path
        answer = self.client.send_bucket([pickle.dumps(message)] * self._engine_tp, version=version)
        return await _checked(placed, answer)

    def close(self) -> None:
        """See Transport."""
        if self._slots is not None:
            self._slots.close()

    def _placed(self, bucket: NamedTensors) -> Bucket:
        if isinstance(bucket, Bucket) and bucket.memory.path is not None:
            return bucket
        self._slots = self._slots or SharedSlots()
        return pack(bucket, self._slots.take(0, packed_size(bucket)))


class IpcTransport(Transport):
    """GPU memory whose CUDA IPC handle travels: every rank of the server reads that of the trainer rank on its GPU.

    Args:
        device: this rank's.
        gather: where the server has several ranks: collective over the trainer ranks that share its GPUs.
        barrier: likewise; it keeps a rank from refilling its buffer before the server has read it.
    """

    def __init__(
        self,
        client: EngineClient | None,
        device: torch.device,
        gather: Gather | None,
        barrier: Callable[[], None] | None,
    ) -> None:
        super().__init__(client)
        self._slots = DeviceSlots(device)
        self._gather, self._barrier = gather, barrier

    async def send(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """See Transport."""
        placed = None if bucket is None else self._placed(bucket)
        payload = self._payload(placed, purpose, first)
        payloads = [payload] if self._gather is None else self._gather(payload)
        answer = NOTHING
        if self.client is not None:
            assert payloads is not None
            answer = await _checked(placed, self.client.send_bucket(payloads, version=version))
        if self._barrier is not None:
            self._barrier()
        return answer

    def close(self) -> None:
        """See Transport."""
        self._slots.close()
        torch.cuda.ipc_collect()

    def _placed(self, bucket: NamedTensors) -> Bucket:
        if isinstance(bucket, Bucket) and bucket.buffer.is_cuda:
            return bucket
        return pack(bucket, self._slots.take(0, packed_size(bucket)))

    def _payload(self, placed: Bucket | None, purpose: Purpose, first: bool) -> bytes:
        # Trainer and server may number the GPUs differently; SGLang's reductions name them by UUID, on both sides.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        message = announce(placed, purpose, first=first, last=placed is None)
        if placed is not None:
            message["buffer"] = placed.buffer
            torch.cuda.synchronize(placed.buffer.device)
        stream = BytesIO()
        ForkingPickler(stream).dump(message)
        return stream.getvalue()


class DistributedTransport(Transport):
    """A broadcast over TCP from the owner to all ranks of the server: where neither memory nor disks are shared."""

    def __init__(self, client: EngineClient | None, engine_tp: int, deadline: float) -> None:
        super().__init__(client)
        self._size, self._deadline = 1 + engine_tp, deadline
        self._group: BroadcastGroup | None = None
        self._slots = DeviceSlots(torch.device("cpu"))

    async def open(self) -> None:
        """See Transport; the first time the two sides meet."""
        if self.client is not None and self._group is None:
            host = urlsplit(self.client.address.url).hostname
            assert host is not None
            store = BroadcastGroup.listen(host, self._size, self._deadline)
            joined = asyncio.ensure_future(self.client.join_broadcast_group(host, store.port, self._size))
            group = asyncio.ensure_future(asyncio.to_thread(BroadcastGroup, store, 0, self._size, self._deadline))
            await joined  # a refusal ends the run, whose end the thread does not outlive
            self._group = await group
        await super().open()

    async def send(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """See Transport."""
        if self.client is None:
            return NOTHING
        placed = None if bucket is None else self._placed(bucket)
        message = announce(placed, purpose, first=first, last=bucket is None)
        broadcast = None
        if placed is not None:
            assert self._group is not None
            # A daemon: should the server refuse, nobody answers the broadcast, and this process is to end.
            broadcast = threading.Thread(target=self._group.broadcast, args=(placed.buffer,), daemon=True)
            broadcast.start()
        answer = await _checked(placed, self.client.receive_broadcast(message, version=version))
        if broadcast is not None:
            await asyncio.to_thread(broadcast.join)
        return answer

    def close(self) -> None:
        """See Transport."""
        self._slots.close()
        self._group = None

    def _placed(self, bucket: NamedTensors) -> Bucket:
        if isinstance(bucket, Bucket) and bucket.buffer.device.type == "cpu":
            return bucket
        return pack(bucket, self._slots.take(0, packed_size(bucket)))


class DiskTransport(Transport):
    """Files that the server reads when all are written, and which are removed then.

    Args:
        folder: where to write: a file system that owner and server both see.
    """

    def __init__(self, client: EngineClient | None, folder: Path) -> None:
        super().__init__(client)
        self._folder = folder
        self._directory: Path | None = None
        self._checksums: list[tuple[str, int]] = []  # in the order of the server's reading
        self._files = 0

    async def open(self) -> None:
        """See Transport; the server's session is that of its reading."""
        if self.client is not None:
            self._files, self._checksums = 0, []
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._directory = Path(tempfile.mkdtemp(prefix=".weights-", dir=self._folder))
            except OSError as error:
                raise self._refused(error) from None

    async def send(
        self, bucket: NamedTensors | None, purpose: Purpose, *, first: bool, version: int | None = None
    ) -> LoadAnswer:
        """See Transport; nothing is read before the last."""
        if self.client is None:
            return NOTHING
        assert self._directory is not None
        try:
            if bucket is not None:
                self._write(bucket)
                return NOTHING
        except OSError as error:
            raise self._refused(error) from None
        answer = await self.client.read_directory(self._directory, purpose, version=version)
        return _compared(answer, self._checksums)

    async def shut(self) -> None:
        """See Transport."""
        self._remove()

    def close(self) -> None:
        """See Transport."""
        self._remove()

    def _write(self, bucket: NamedTensors) -> None:
        assert self._directory is not None
        placed = bucket
        if not isinstance(bucket, Bucket) or bucket.buffer.device.type != "cpu":
            placed = pack(bucket, DeviceSlots(torch.device("cpu")).take(0, packed_size(bucket)))
        assert isinstance(placed, Bucket)
        sums = dict(zip((name for name, _ in placed), checksums(placed), strict=True))
        self._checksums += [(name, sums[name]) for name in write_tensors(self._directory, self._files, placed)]
        self._files += 1

    def _remove(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _refused(self, error: OSError) -> RunFailed:
        return RunFailed(
            f"{self._folder}: weights for an engine cannot be written ({error.strerror or error}): free space there, "
            "name another place as rollout.sync.directory, or choose another rollout.sync.transport"
        )


async def _checked(placed: Bucket | None, answer: Awaitable[LoadAnswer]) -> LoadAnswer:
    """The answer of a server to a bucket, and what the checksums say; ours are made while the server loads."""
    loading = asyncio.ensure_future(answer)
    sums = [] if placed is None else await asyncio.to_thread(checksums, placed)
    names = [] if placed is None else [name for name, _ in placed]
    return _compared(await loading, list(zip(names, sums, strict=True)))


def _compared(answer: LoadAnswer, expected: list[tuple[str, int]]) -> LoadAnswer:
    """The answer, with a problem for each tensor that did not come to every rank of the server as it was sent."""
    damaged = [
        name
        for i, (name, expected_sum) in enumerate(expected)
        if any(i >= len(came) or came[i] != expected_sum for came in answer.checksums)
    ]
    problems = [f"{name} arrived damaged: its checksum is not the sender's" for name in damaged]
    return LoadAnswer(problems + answer.problems, answer.seconds, answer.checksums)
