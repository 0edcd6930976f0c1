"""Spreads groups of prompts over all servers and collects the responses."""

import asyncio
import heapq
import itertools
import logging
import queue
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.engines.keeper import end_server
from vapo_megatron.engines.request import GenerationRequest, GroupRequest, continued_response, empty_response
from vapo_megatron.engines.server.client import Completion, EngineClient, EngineWrong
from vapo_megatron.engines.server.process import EngineAddress
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.loop_thread import LoopThread, allow_connections

# Groups that wait in a server keep its batch full while finished ones travel back.
_QUEUED_PER_RUNNING = 2
_ABORT_SECONDS = 30.0
_STOP_POLL_SECONDS = 0.2
_LOOK_SECONDS = 0.5

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass
class _Outstanding:
    """A server and its unfinished work."""

    client: EngineClient
    requests: int = 0
    tokens: int = 0
    lost: bool = False
    busy_since: float = 0.0
    busy_seconds: float = 0.0

    def give(self, group: GroupRequest, now: float) -> None:
        if self.requests == 0:
            self.busy_since = now
        self.requests += group.samples
        self.tokens += group.max_tokens

    def take_back(self, group: GroupRequest, now: float) -> None:
        self.requests -= group.samples
        self.tokens -= group.max_tokens
        if self.requests == 0:
            self.busy_seconds += now - self.busy_since


@dataclass(order=True)
class _Waiting:
    """A group that waits for a server with room; earlier groups go first."""

    number: int
    group: GroupRequest = field(compare=False)
    engine: "asyncio.Future[_Outstanding | None]" = field(compare=False)


class Dispatcher:
    """Rank 0's client of all servers. One event loop, in its own thread, talks to all of them at once.

    collect() and wait() block their caller; generate() is for coroutines on `loop`. A server that fails gets no work
    until use(), and its unfinished groups go to the others, which write the same samples from the same seeds.

    Attributes:
        when_stranded: called again and again by the thread that waits while no server is left.

    Args:
        engines: all servers of the job.
        config: the rollout section.
        stop_token_ids: tokens that end a response and belong to it.
        are_replaced: whether servers that end are started again. Then a server with impossible answers is ended, and
            groups wait even if it was the last; otherwise the error of the last server is raised.
        vocabulary: size of the model's vocabulary; None: unknown.
        client: makes the client of a server.
    """

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        stop_token_ids: Sequence[int],
        are_replaced: bool = False,
        vocabulary: int | None = None,
        client: Callable[[EngineAddress, float], EngineClient] = EngineClient,
    ) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._stop_token_ids, self._are_replaced = list(stop_token_ids), are_replaced
        self._engines = [_Outstanding(client(address, config.collect_timeout_s)) for address in engines]
        self._waiting: list[_Waiting] = []
        self._running: dict[int, tuple[EngineClient, list[str]]] = {}
        self._numbers = itertools.count()
        self.when_stranded: Callable[[], None] | None = None
        self.loop = LoopThread()
        allow_connections()

    def collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None = None,
        on_group: Callable[[list[Sample]], None] | None = None,
        generate: Callable[[GroupRequest], Awaitable[list[Sample]]] | None = None,
    ) -> list[Sample]:
        """The responses to a request, ordered by (group, index); group is the prompt's place in request.prompts.

        Args:
            request: what to generate.
            on_done: called with the number of responses that have just finished.
            on_group: called with the responses to a prompt as soon as they are complete.
            generate: used in place of generate() for each prompt: an agent.

        Raises:
            RunFailed: a server refused a request or has weights of another run; or the last server's answers have
                another weight version or impossible experts (EngineWrong).
            TryAgain: the last server is gone, or rollout.collect_timeout_s passed.
        """
        finished: queue.SimpleQueue[list[Sample] | None] = queue.SimpleQueue()
        work = self.loop.start(self._collect(request, finished.put, generate or self.generate))
        work.add_done_callback(lambda _: finished.put(None))
        try:
            while (samples := self._next(finished)) is not None:
                if on_done is not None:
                    on_done(len(samples))
                if on_group is not None:
                    on_group(samples)
        except BaseException:
            work.cancel()
            raise
        return work.result()

    def wait(self, work: "Future[T]") -> T:
        """The result of a future on `loop`, which is cancelled if this thread is interrupted."""
        try:
            while not futures.wait([work], _LOOK_SECONDS).done:
                self._call_for_help()
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def _next(self, finished: "queue.SimpleQueue[T]") -> T:
        while True:
            with suppress(queue.Empty):
                return finished.get(timeout=_LOOK_SECONDS)
            self._call_for_help()

    def _call_for_help(self) -> None:
        if self.when_stranded is not None and all(engine.lost for engine in self._engines):
            self.when_stranded()

    async def generate(
        self, group: GroupRequest, waits: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> list[Sample]:
        """The responses to one prompt, from the server with the fewest outstanding tokens. Cancelling aborts them.

        stop() ends them early: unfinished responses then have the finish_reason abort. waits: entered each time that
        the group waits until a server has room for it.

        Raises:
            RunFailed: a server refused the request or has weights of another run.
            EngineWrong, TryAgain: the last server failed.
        """
        number = next(self._numbers)
        samples = list(group.begun) or [empty_response(group, index) for index in range(group.samples)]
        left = [sample for sample in samples if sample.finish_reason == "abort"]
        while True:
            with waits():
                engine = await self._engine_for(number, group)
            if engine is None:  # stopped before it began
                return samples
            try:
                completions = await self._ask(engine, number, group, left)
                self._check(engine.client.address, left, completions, group)
                break
            except (TryAgain, EngineWrong) as error:
                self._give_up(engine, error)
            finally:
                engine.take_back(group, self.loop.time())
                self._give_out()
        for sample, completion in zip(left, completions, strict=True):
            samples[sample.index] = continued_response(sample, completion, group, engine.client.address.url)
        return samples

    async def parse_tool_calls(
        self, url: str, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """EngineClient.parse_tool_calls of the server at this URL, or of another one if that is gone."""
        engines = sorted(self._engines, key=lambda e: (e.lost, e.client.address.url != url))
        return await engines[0].client.parse_tool_calls(text, tools, parser)

    async def stop(self) -> None:
        """On `loop`: end all running responses; generate() returns them as far as they got."""
        while self._running or self._waiting:
            while self._waiting:
                engine = heapq.heappop(self._waiting).engine
                if not engine.done():
                    engine.set_result(None)
            running: defaultdict[EngineClient, list[str]] = defaultdict(list)
            for client, ids in self._running.values():
                running[client] += ids
            await asyncio.gather(*(_abort(client, ids) for client, ids in running.items()))
            await asyncio.sleep(_STOP_POLL_SECONDS)  # a request may have been on its way to the server

    def lose(self, url: str) -> None:
        """Give the server at this URL no more work; its unfinished groups go to the others, before all later groups.

        Blocks; not for coroutines on `loop`.
        """
        self.loop.run(self._lose(url))

    def use(self, urls: Collection[str]) -> None:
        """Give work only to the servers at these URLs: they have the weights. Not for coroutines on `loop`."""
        self.loop.run(self._use(urls))

    def busy_seconds(self) -> float:
        """Seconds in which servers had work so far, summed over servers."""
        now = self.loop.time()
        return sum(e.busy_seconds + (now - e.busy_since if e.requests else 0.0) for e in self._engines)

    def overdue(self, finished: int, wanted: int) -> TryAgain:
        """The error of a collection that takes longer than rollout.collect_timeout_s."""
        return TryAgain(
            f"{finished} of {wanted} responses came within rollout.collect_timeout_s="
            f"{self._config.collect_timeout_s:g} s: raise it, or look at the servers' logs, the first of which is "
            f"{self._engines[0].client.address.log_file}"
        )

    def close(self) -> None:
        """End running requests and close all connections. The servers live on."""
        self.loop.cancel_all()
        self.loop.run(self._close_clients())
        self.loop.close()

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _close_clients(self) -> None:
        for engine in self._engines:
            await engine.client.close()

    async def _lose(self, url: str) -> None:
        for engine in self._engines:
            if engine.client.address.url == url:
                engine.lost = True
                await engine.client.close()  # its requests fail now, not when their deadline passes

    async def _use(self, urls: Collection[str]) -> None:
        for engine in self._engines:
            engine.lost = engine.client.address.url not in urls
        self._give_out()

    def _give_up(self, engine: _Outstanding, error: TryAgain | EngineWrong) -> None:
        """Take work from a server that failed; raises the error if no server can do it, now or later."""
        if not self._are_replaced and all(remaining.lost for remaining in self._engines if remaining is not engine):
            raise error
        if not engine.lost:
            engine.lost = True
            _logger.warning("an engine gets no more work until it has weights again: %s", error)
            loop, address = asyncio.get_running_loop(), engine.client.address
            if isinstance(error, EngineWrong) and self._are_replaced:  # it is alive: its owner is to start it again
                loop.run_in_executor(None, end_server, address, str(error))
            loop.create_task(engine.client.close())  # its other requests fail now, not when their deadline passes

    async def _collect(
        self,
        request: GenerationRequest,
        on_group: Callable[[list[Sample]], None],
        generate: Callable[[GroupRequest], Awaitable[list[Sample]]],
    ) -> list[Sample]:
        finished = 0

        async def sample_group(group: GroupRequest) -> list[Sample]:
            nonlocal finished
            samples = await generate(group)
            finished += len(samples)
            on_group(samples)
            return samples

        try:
            async with asyncio.timeout(self._config.collect_timeout_s), asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(sample_group(group)) for group in request.groups()]
        except TimeoutError:
            raise self.overdue(finished, request.num_samples) from None
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [sample for task in groups for sample in task.result()]

    async def _ask(
        self, engine: _Outstanding, number: int, group: GroupRequest, left: Sequence[Sample]
    ) -> list[Completion]:
        """A server's continuations of a group's unfinished samples."""
        prompts = [[*group.prompt.token_ids, *sample.response_ids.tolist()] for sample in left]
        params = [self._sampling_params(group, sample) for sample in left]
        ids = [uuid.uuid4().hex for _ in left]
        self._running[number] = engine.client, ids
        try:
            return await engine.client.generate(prompts, params, group.routed_experts, ids, group.goes_on)
        except asyncio.CancelledError:
            await asyncio.shield(_abort(engine.client, ids))
            raise
        finally:
            del self._running[number]

    async def _engine_for(self, number: int, group: GroupRequest) -> _Outstanding | None:
        """Wait for a server with room and count the group as its work. None: stop() was called."""
        waiting = _Waiting(number, group, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._give_out()
        try:
            return await waiting.engine
        except asyncio.CancelledError:
            engine = waiting.engine.result() if waiting.engine.done() and not waiting.engine.cancelled() else None
            if engine is not None:
                engine.take_back(group, self.loop.time())
                self._give_out()
            raise

    def _give_out(self) -> None:
        """Give waiting groups, in order, to servers with room."""
        while self._waiting:
            first = self._waiting[0]
            if not first.engine.cancelled():
                able = [e for e in self._engines if not e.lost and self._has_room(e, first.group.samples)]
                if not able:
                    return
                engine = min(able, key=lambda e: (e.client.address.url != first.group.engine, e.tokens))
                engine.give(first.group, self.loop.time())
                first.engine.set_result(engine)
            heapq.heappop(self._waiting)

    def _has_room(self, engine: _Outstanding, n: int) -> bool:
        limit = _QUEUED_PER_RUNNING * self._config.max_running_requests
        return engine.requests == 0 or engine.requests + n <= limit

    def _check(
        self, address: EngineAddress, left: Sequence[Sample], completions: Sequence[Completion], group: GroupRequest
    ) -> None:
        """Raises EngineWrong if no engine with the group's weights could have written this."""
        expected, vocabulary = group.weight_version, self._vocabulary
        for sample, completion in zip(left, completions, strict=True):
            oldest, newest = completion.weight_version_oldest, completion.weight_version
            if oldest < expected or (newest != expected and not group.goes_on):
                raise EngineWrong(
                    f"{address}: a response was made by weights of version "
                    f"{oldest} to {newest}, expected {expected}: a weight sync was missed"
                )
            ids, room = completion.token_ids, group.room(len(sample.response_ids))
            if len(ids) > room:
                raise EngineWrong(f"{address}: a response of {len(ids)} tokens came, at most {room} were asked for")
            if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
                raise EngineWrong(
                    f"{address}: a response has tokens {ids.min()} to {ids.max()}, the model has {vocabulary}"
                )

    def _sampling_params(self, group: GroupRequest, sample: Sample) -> dict[str, Any]:
        return {
            "temperature": group.sampling.temperature,
            "top_p": group.sampling.top_p,
            "max_new_tokens": group.room(len(sample.response_ids)),
            "stop_token_ids": self._stop_token_ids,
            "sampling_seed": sample.seed,  # read with rollout.deterministic alone
        }


async def _abort(client: EngineClient, ids: Sequence[str]) -> None:
    with suppress(TryAgain, RunFailed, TimeoutError):  # the server may be ending
        async with asyncio.timeout(_ABORT_SECONDS):
            await client.abort(ids)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first error of several tasks."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
