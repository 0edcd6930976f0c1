"""The hand-over of the trainer's weights to one server, and the proof that they arrived."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch

from vapo_megatron.config.rollout import SyncConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.client import EngineClient
from vapo_megatron.rollout.server import EngineAddress
from vapo_megatron.rollout.weight_bucket import DeviceBuffer, NamedTensors, Purpose, SharedMemoryBuffer, WeightBuffer

# In the order of the server's tensor-parallel ranks; None everywhere but on the server's owner.
Gather = Callable[[bytes], list[bytes] | None]

_NAMED_IN_AN_ERROR = 8


class WeightSync:
    """One server and the trainer ranks that feed it: as many as the server has tensor-parallel ranks.

    With GPUs, each of these ranks shares its GPU with one rank of the server and hands over its own copy of every
    bucket through CUDA IPC; the owner gathers their payloads and speaks to the server. Without, the owner alone writes
    into shared memory that all ranks of the server read. Every rank calls push() and differing_tensors() with the same
    buckets; prompt_logprobs() and verify() are the owner's.

    Args:
        address: of the server, on the rank that owns it; None on the others of its ranks.
        config: the sync section.
        engine_tp: tensor-parallel ranks of the server.
        device: of the GPU path; None without GPUs.
        gather: of the GPU path where engine_tp > 1: collective over these ranks.
        barrier: likewise; it keeps a rank from refilling its buffer before the server has read it.
    """

    def __init__(
        self,
        address: EngineAddress | None,
        config: SyncConfig,
        engine_tp: int = 1,
        device: torch.device | None = None,
        gather: Gather | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        self._client = EngineClient(address, config.deadline) if address is not None else None
        self._engine_tp = engine_tp
        self._shared = device is None
        self._gather = gather
        self._barrier = barrier
        self._buffer: WeightBuffer = SharedMemoryBuffer() if device is None else DeviceBuffer(device)
        self._runner = asyncio.Runner()

    def push(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """Replace the server's weights; what it generates from now on is marked with version.

        buckets are (Hugging Face name, whole tensor) pairs. A running response is aborted. The server's cache is
        dropped.

        Raises:
            RunFailed: a name the server does not know, a shape that does not fit, or parameters that were not sent. The
                server then takes no requests until a later push succeeds.
        """
        self._session(buckets, "load", version)

    def differing_tensors(self, buckets: Iterable[NamedTensors]) -> list[str]:
        """Compare without changing anything: one line for each tensor that differs bit by bit from the server's.

        Names the server does not know and parameters missing from buckets are told of likewise. On ranks that do not
        own the server the list is empty.
        """
        return self._session(buckets, "compare", None)

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """EngineClient.prompt_logprobs."""
        return self._runner.run(self._owned().prompt_logprobs(sequences))

    def verify(
        self, sequences: Sequence[Sequence[int]], trainer_logprobs: Sequence[Sequence[float]], tolerance: float
    ) -> float:
        """The largest |difference| of the log-probs that server and trainer give the tokens of sequences.

        trainer_logprobs are those of every token but the first, at temperature 1.

        Raises:
            RunFailed: it is above tolerance, or not a number.
        """
        largest = 0.0
        for ours, theirs in zip(trainer_logprobs, self.prompt_logprobs(sequences), strict=True):
            difference = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
            # Not Python's max(): a NaN would pass unnoticed.
            largest = max(largest, float("inf") if difference.isnan().any() else float(difference.abs().max()))
        if largest > tolerance:
            address = self._owned().address
            raise RunFailed(
                f"{address.url} (log {address.log_file}): log-probs of engine and trainer differ by {largest:.3g}, "
                f"rollout.sync.tolerance allows {tolerance:g}"
            )
        return largest

    def close(self) -> None:
        """Close the connection and give the buffer back."""
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()
        self._buffer.close()

    def __enter__(self) -> "WeightSync":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _owned(self) -> EngineClient:
        if self._client is None:
            raise RunFailed("only the rank that owns a server may ask it for log-probs")
        return self._client

    def _session(self, buckets: Iterable[NamedTensors], purpose: Purpose, version: int | None) -> list[str]:
        if self._client is not None:
            self._runner.run(self._client.pause())
            self._runner.run(self._client.begin_weight_update())
        problems: list[str] = []
        first = True
        for bucket in buckets:
            problems += self._hand_over(bucket, purpose, first=first)
            first = False
        # An empty bucket ends the hand-over: to know which bucket is the last one would be to hold two.
        problems += self._hand_over([], purpose, first=first, last=True, version=version)
        if self._client is not None:
            self._runner.run(self._client.end_weight_update())
            if problems and purpose == "load":
                raise self._rejected(self._client.address, problems)
            self._runner.run(self._client.resume())
        return problems

    def _hand_over(
        self, bucket: NamedTensors, purpose: Purpose, *, first: bool, last: bool = False, version: int | None = None
    ) -> list[str]:
        payloads: list[bytes] | None
        if self._shared:
            if self._client is None:
                return []
            payloads = [self._buffer.pack(bucket, purpose, first=first, last=last)] * self._engine_tp
        else:
            payload = self._buffer.pack(bucket, purpose, first=first, last=last)
            payloads = [payload] if self._gather is None else self._gather(payload)
        problems: list[str] = []
        if self._client is not None:
            assert payloads is not None
            problems = self._runner.run(self._client.send_bucket(payloads, version=version))
        if self._barrier is not None:
            self._barrier()
        return problems

    @staticmethod
    def _rejected(address: EngineAddress, problems: Sequence[str]) -> RunFailed:
        named = "; ".join(problems[:_NAMED_IN_AN_ERROR])
        more = f"; and {len(problems) - _NAMED_IN_AN_ERROR} more" if len(problems) > _NAMED_IN_AN_ERROR else ""
        return RunFailed(f"{address.url} (log {address.log_file}): weights were not accepted: {named}{more}")
