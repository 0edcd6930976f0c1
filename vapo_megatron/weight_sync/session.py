"""The weight sync of the trainer's weights to servers, and the proof that they arrived."""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType

from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.client import EngineClient, PauseMode
from vapo_megatron.weight_sync.bucket_message import Purpose
from vapo_megatron.weight_sync.logprob_difference import LogprobDifference, compare_logprobs
from vapo_megatron.weight_sync.transports import Transport
from vapo_megatron.weights.bucket import NamedTensors
from vapo_megatron.weights.part_times import PartTimes

_NAMED_IN_AN_ERROR = 8


class WeightSync:
    """One server, or several that get the same bytes, and the trainer ranks that feed them, by one transport.

    Every rank calls load() and differing_tensors() with the same buckets; prompt_logprobs() and verify() are the
    owner's. The buckets may come from a stream that puts them into two places in turn.

    Args:
        transport: to the servers. Its clients are closed with this object.
        pause: what becomes of responses that run when weights come.
    """

    def __init__(self, transport: Transport, pause: PauseMode = "abort") -> None:
        self._transport, self._pause = transport, pause
        self._runner = asyncio.Runner()

    @property
    def owns(self) -> bool:
        """Whether this rank may ask servers for log-probs."""
        return bool(self._transport.clients)

    def load(self, buckets: Iterable[NamedTensors], version: int, times: PartTimes | None = None) -> None:
        """Replace the server's weights; what it generates from now on is marked with version.

        buckets are (Hugging Face name, whole tensor) pairs. times gets the owner's seconds of "load" (in the server)
        and "send" (the rest of sending).

        Raises:
            RunFailed: a name the server does not know, a shape that does not fit, parameters that were not sent, or
                tensors that arrived damaged. The server then takes no requests until a later load succeeds.
        """
        self._stream(buckets, "load", version, times or PartTimes())

    def differing_tensors(self, buckets: Iterable[NamedTensors]) -> list[str]:
        """Compare without changing anything: one line for each tensor that differs bit by bit from the server's.

        Names the server does not know and parameters missing from buckets get lines likewise. On ranks that do not
        own the server the list is empty.
        """
        return self._stream(buckets, "compare", None, PartTimes())

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """EngineClient.prompt_logprobs of every server."""
        return self._runner.run(self._transport.each(lambda client: client.prompt_logprobs(sequences)))

    def verify(
        self, sequences: Sequence[Sequence[int]], trainer_logprobs: Sequence[Sequence[float]], tolerance: float
    ) -> float:
        """The largest |difference| of the log-probs that a server and the trainer give the tokens of sequences.

        trainer_logprobs are those of every token but the first, at temperature 1.

        Raises:
            RunFailed: it is above tolerance, or not a number.
        """
        found = self.logprob_differences(sequences, trainer_logprobs)
        for client, difference in zip(self._transport.clients, found, strict=True):
            if difference.largest > tolerance:
                address = client.address
                raise RunFailed(
                    f"{address.url} (log {address.log_file}): log-probs of engine and trainer differ by "
                    f"{difference.largest:.3g}, rollout.sync.tolerance allows {tolerance:g}"
                )
        return max(difference.largest for difference in found)

    def logprob_differences(
        self, sequences: Sequence[Sequence[int]], trainer_logprobs: Sequence[Sequence[float]], quantile: float = 1.0
    ) -> list[LogprobDifference]:
        """Of every server from the trainer; trainer_logprobs as in verify()."""
        return [compare_logprobs(trainer_logprobs, found, quantile) for found in self.prompt_logprobs(sequences)]

    def close(self) -> None:
        """Close the connection and give the buffers back."""
        self._transport.close()
        self._runner.run(self._transport.each(EngineClient.close))
        self._runner.close()

    def __enter__(self) -> "WeightSync":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stream(
        self, buckets: Iterable[NamedTensors], purpose: Purpose, version: int | None, times: PartTimes
    ) -> list[str]:
        transport, run = self._transport, self._runner.run
        run(transport.each(lambda client: client.pause(self._pause)))
        run(transport.begin_session())
        problems: list[str] = []
        first = True
        for bucket in buckets:
            problems += self._deliver(bucket, purpose, first, None, times)
            first = False
        # Nothing ends the weight sync: to know which bucket is the last one would be to hold two.
        problems += self._deliver(None, purpose, first, version, times)
        run(transport.end_session())
        if problems and purpose == "load":
            raise self._rejected(problems)
        run(transport.each(EngineClient.resume))
        return problems

    def _deliver(
        self, bucket: NamedTensors | None, purpose: Purpose, first: bool, version: int | None, times: PartTimes
    ) -> list[str]:
        with times.part("send"):
            answer = self._runner.run(self._transport.deliver(bucket, purpose, first=first, version=version))
        times.add("load", answer.seconds)
        times.add("send", -answer.seconds)
        return answer.problems

    def _rejected(self, problems: Sequence[str]) -> RunFailed:
        addresses = (client.address for client in self._transport.clients)
        where = ", ".join(f"{address.url} (log {address.log_file})" for address in addresses)
        return RunFailed(f"{where}: weights were not accepted: {some_of(problems)}")


def some_of(problems: Sequence[str]) -> str:
    """The first problems in one line, and how many more there are."""
    more = [f"and {len(problems) - _NAMED_IN_AN_ERROR} more"] if len(problems) > _NAMED_IN_AN_ERROR else []
    return "; ".join([*problems[:_NAMED_IN_AN_ERROR], *more])
