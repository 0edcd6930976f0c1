"""Copies the trainer's weights to servers, and verifies that they arrived."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from vapo_megatron.engines.server.client import EngineClient, PauseMode
from vapo_megatron.engines.weight_sync.logprob_difference import LogprobDifference, compare_logprobs
from vapo_megatron.engines.weight_sync.transports import NOTHING, Transport
from vapo_megatron.errors import RunFailed, TryAgain, VapoError
from vapo_megatron.weights.bucket import NEEDS_GATHERED, NamedTensors, Purpose
from vapo_megatron.weights.gather import PartTimes

_NAMED_IN_AN_ERROR = 8

T = TypeVar("T")


class EngineLost(TryAgain):
    """A server failed during a weight sync; the others may continue to serve."""


class WeightSync:
    """Sends weights from trainer ranks to one server, or the same bytes to several, by one
    transport.

    Every rank calls load() and differing_tensors() with the same buckets, which may come from a
    stream that reuses two buffers in turn.

    Args:
        transport: carries buckets to the servers. Its clients are closed with this object.
        pause: what a weight sync does to running responses.

    Attributes:
        own_buckets: numbers of the buckets of which the server takes own shares, by the masks of
            the last load(); all on ranks that own no server.
    """

    def __init__(self, transport: Transport, pause: PauseMode = "abort") -> None:
        self._transport = transport
        self._pause = pause
        self._known = transport.clients
        self.own_buckets: frozenset[int] = frozenset()
        self._starts: dict[str, int] = {}
        self._runner = asyncio.Runner()

    @property
    def served(self) -> list[str]:
        """URLs of the servers that take part."""
        return [client.address.url for client in self._transport.clients]

    @property
    def sends(self) -> bool:
        """Whether this rank's buckets may be read. If not, it only takes part in the collectives
        that make them."""
        return self._transport.sends

    @property
    def sent_share(self) -> float | None:
        """See Transport."""
        return self._transport.sent_share

    def serve(self, starts: Mapping[str, int]) -> None:
        """Feed the servers at these URLs from now on.

        Args:
            starts: a number for each URL, which changes when that server is restarted.
        """
        if any(starts.get(url) != number for url, number in self._starts.items()):
            self._transport.serve(())  # drops the connections to servers that are gone
        self._starts = dict(starts)
        self._transport.serve([client for client in self._known if client.address.url in starts])

    def pair_with(self, ranks: dist.ProcessGroup) -> bool:
        """See Transport."""
        return self._transport.pair_with(ranks)

    def load(
        self,
        buckets: Iterable[NamedTensors],
        version: int,
        times: PartTimes | None = None,
        masks: Iterable[NamedTensors] = (),
    ) -> bool:
        """Replace the servers' weights. Responses from now on are marked with the version.

        Args:
            buckets: (Hugging Face name, whole tensor) pairs.
            version: of these weights.
            times: gets the owner's seconds of "load" (in the server) and "send" (the rest of
                sending).
            masks: of the own shares in these buckets (weights.export.stream_masks), for
                own_buckets.

        Returns:
            False: the server cannot take own shares of all of these buckets, and takes no requests
            until it got gathered ones.

        Raises:
            RunFailed: an unknown name, a shape that does not fit, parameters that were not sent, or
                tensors that arrived damaged. The server then takes no requests until a later load
                succeeds.
            EngineLost: a server is gone, silent or refuses to continue. All buckets were iterated
                nevertheless, because other ranks depend on it. No server is fed until serve().
        """
        problems = self._stream(buckets, "load", version, times or PartTimes(), masks)
        return NEEDS_GATHERED not in problems

    def differing_tensors(self, buckets: Iterable[NamedTensors]) -> list[str]:
        """Compare without changing anything: one line for each tensor that is not bitwise equal to
        the server's.

        Unknown names and parameters missing from the buckets get lines as well. The list is empty
        on ranks that do not own the server.
        """
        return self._stream(buckets, "compare", None, PartTimes())

    def logprob_differences(
        self,
        sequences: Sequence[Sequence[int]],
        trainer_logprobs: Sequence[Sequence[float]],
        quantile: float,
    ) -> dict[str, LogprobDifference]:
        """How far each server's log-probs of some sequences are from the trainer's, by URL.

        Args:
            sequences: token ids.
            trainer_logprobs: of every token but the first, at temperature 1.
            quantile: see compare_logprobs.

        Returns:
            Empty on ranks that own no server.
        """
        answers = self._runner.run(
            self._transport.each(lambda client: client.prompt_logprobs(sequences))
        )
        differences = [compare_logprobs(trainer_logprobs, answer, quantile) for answer in answers]
        return dict(zip(self.served, differences, strict=True))

    def close(self) -> None:
        """Close the connections and release the buffers."""
        self._transport.close()
        self._transport.serve(self._known)
        self._runner.run(self._transport.each(EngineClient.close))
        self._runner.close()

    def __enter__(self) -> "WeightSync":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(
        self,
        buckets: Iterable[NamedTensors],
        purpose: Purpose,
        version: int | None,
        times: PartTimes,
        masks: Iterable[NamedTensors] = (),
    ) -> list[str]:
        transport = self._transport
        lost: list[VapoError] = []

        def run(call: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
            """The result of a call. If a server fails, this rank continues without it: the other
            ranks wait in the collectives that make the buckets."""
            try:
                return self._runner.run(call())
            except VapoError as error:
                if not transport.clients:
                    raise
                lost.append(error)
                transport.serve(())
                return None

        run(lambda: transport.each(lambda client: client.pause(self._pause)))
        run(transport.begin_session)
        problems: list[str] = []
        first = True
        # The sync ends with an empty bucket: marking the last one would mean holding two at a time.
        for bucket in itertools.chain(buckets, [None]):
            final_version = version if bucket is None else None
            deliver = partial(
                transport.deliver, bucket, purpose, first=first, version=final_version
            )
            with times.part("send"):
                answer = run(deliver) or NOTHING
            times.add("load", answer.seconds)
            times.add("send", -answer.seconds)
            problems += answer.problems
            first = False
        refused = []
        for mask in masks:
            cover = partial(transport.deliver, mask, "cover", first=False)
            with times.part("send"):
                answer = run(cover) or NOTHING
            refused.append(bool(answer.problems))
        self.own_buckets = frozenset(number for number, no in enumerate(refused) if not no)
        run(transport.end_session)
        if purpose == "load" and NEEDS_GATHERED in problems:
            if lost:
                raise EngineLost(str(lost[0]))
            return problems
        if purpose == "load" and problems:
            raise self._rejected(problems)
        run(lambda: transport.each(EngineClient.resume))
        if lost:
            raise EngineLost(str(lost[0]))
        return problems

    def _rejected(self, problems: Sequence[str]) -> RunFailed:
        addresses = ", ".join(str(client.address) for client in self._transport.clients)
        return RunFailed(f"{addresses}: weights were not accepted: {shorten(problems)}")


def shorten(problems: Sequence[str]) -> str:
    """The first problems in one line, and the number of further ones."""
    named = list(problems[:_NAMED_IN_AN_ERROR])
    if len(problems) > len(named):
        named.append(f"and {len(problems) - len(named)} more")
    return "; ".join(named)
