"""Spreads groups of prompts over all engines and collects the responses."""

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
from vapo_megatron.engines.external_server import end_server
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion, EngineClient
from vapo_megatron.engines.server.connection import REQUEST_SECONDS, EngineWrong
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.loop_thread import LoopThread, allow_connections
from vapo_megatron.rollout.engine_queue import EngineLoad, EngineQueue
from vapo_megatron.rollout.progress import Progress
from vapo_megatron.rollout.request import (
    GenerationRequest,
    GroupRequest,
    continued_response,
    empty_response,
)

# Groups that wait inside an engine keep its batch full while finished ones travel back.
_QUEUED_PER_RUNNING = 2
_ABORT_SECONDS = 30.0
_STOP_POLL_SECONDS = 0.2
_LOOK_SECONDS = 0.5

T = TypeVar("T")

_logger = logging.getLogger(__name__)


def _client(address: EngineAddress, deadline: float) -> EngineClient:
    """A client whose generate() waits as long as responses take: collections have limits of their
    own."""
    return EngineClient(address, deadline, limits_responses=False)


@dataclass(order=True)
class _WaitingGroup:
    """A group that waits for an engine with room. Earlier groups go first."""

    number: int
    group: GroupRequest = field(compare=False)
    engine: "asyncio.Future[EngineLoad | None]" = field(compare=False)


class Dispatcher:
    """Rank 0's client of all engines. One event loop in its own thread talks to all of them at
    once.

    collect() and wait() block their caller; generate() is for coroutines on `loop`. An engine that
    fails gets no work until use(), and its unfinished groups go to the others, which write the same
    samples from the same seeds.

    Attributes:
        on_wait: called repeatedly by the thread that waits.
        on_no_engine_left: called repeatedly by the thread that waits while no engine is left.
        progress: of everything that runs on `loop`; responses count as progress.

    Args:
        engines: all engines of the job.
        config: the rollout section.
        stop_token_ids: tokens that end a response and belong to it.
        are_replaced: whether failed engines are restarted. Then an engine with invalid answers is
            killed, and groups wait even if it was the last one. Otherwise the last engine's error
            is raised.
        vocabulary: size of the model's vocabulary; None: unknown.
        client: makes the client of an engine.
    """

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        stop_token_ids: Sequence[int],
        are_replaced: bool = False,
        vocabulary: int | None = None,
        client: Callable[[EngineAddress, float], EngineClient] = _client,
    ) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._stop_token_ids = list(stop_token_ids)
        self._are_replaced = are_replaced
        self._engines = [EngineLoad(client(address, REQUEST_SECONDS)) for address in engines]
        self._queue = EngineQueue(self._engines, _QUEUED_PER_RUNNING * config.max_running_requests)
        self._waiting: list[_WaitingGroup] = []
        self._running: dict[int, tuple[EngineClient, list[str]]] = {}
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self.on_wait: Callable[[], None] | None = None
        self.on_no_engine_left: Callable[[], None] | None = None
        self.progress = Progress()
        self.loop = LoopThread()
        allow_connections()

    def collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None = None,
        on_group: Callable[[list[Sample]], None] | None = None,
        generate: Callable[[GroupRequest], Awaitable[list[Sample]]] | None = None,
    ) -> list[Sample]:
        """The responses to a request, ordered by (group, index).

        A sample's group is the position of its prompt in request.prompts.

        Args:
            request: what to generate.
            on_done: called with the number of responses that have just finished.
            on_group: called with the responses to a prompt as soon as they are complete.
            generate: used instead of generate() for each prompt: an agent.

        Raises:
            RunFailed: an engine refused a request or has weights of another run; or the last
                engine's answers have another weight version or invalid experts (EngineWrong).
            TryAgain: the last engine is gone, or nothing arrived for rollout.collect_timeout_s.
        """
        finished: queue.SimpleQueue[list[Sample] | None] = queue.SimpleQueue()
        work = self.loop.start(self._collect(request, finished.put, generate or self.generate))
        work.add_done_callback(lambda _: finished.put(None))
        try:
            while (samples := self._next(finished)) is not None:
                if self.on_wait is not None:
                    self.on_wait()
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
                self._while_waiting()
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def _next(self, finished: "queue.SimpleQueue[T]") -> T:
        while True:
            with suppress(queue.Empty):
                return finished.get(timeout=_LOOK_SECONDS)
            self._while_waiting()

    def _while_waiting(self) -> None:
        if self.on_wait is not None:
            self.on_wait()
        if self.on_no_engine_left is not None and all(engine.lost for engine in self._engines):
            self.on_no_engine_left()

    async def generate(
        self, group: GroupRequest, waits: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> list[Sample]:
        """The responses to one prompt, from the engine with the fewest outstanding tokens.

        Cancelling it aborts the requests. stop() ends them early: unfinished responses then have
        the finish_reason abort.

        Args:
            group: the prompt and what to draw.
            waits: entered each time that the group waits for an engine with room.

        Raises:
            RunFailed: an engine refused the request or has weights of another run.
            EngineWrong, TryAgain: the last engine failed.
        """
        number = next(self._numbers)
        samples = list(group.begun)
        if not samples:
            samples = [empty_response(group, index) for index in range(group.samples)]
        unfinished = [sample for sample in samples if sample.finish_reason == "abort"]
        while True:
            with waits():
                engine = await self._engine_for(number, group)
            if engine is None:  # stop() came first
                return samples
            try:
                completions = await self._ask(engine, number, group, unfinished)
                self._check(engine.client.address, unfinished, completions, group)
                break
            except (TryAgain, EngineWrong) as error:
                self._give_up(engine, error)
            finally:
                engine.remove(group, self.loop.time())
                self._queue.update(engine)
                self._give_out()
        self.progress.note()
        for sample, completion in zip(unfinished, completions, strict=True):
            samples[sample.index] = continued_response(sample, completion, group, engine.url)
        return samples

    async def parse_tool_calls(
        self, url: str, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """EngineClient.parse_tool_calls of the engine at this URL, or of another one if it is
        gone."""
        engine = min(self._engines, key=lambda engine: (engine.lost, engine.url != url))
        return await engine.client.parse_tool_calls(text, tools, parser)

    async def stop(self) -> None:
        """On `loop`: end all running responses; generate() returns their tokens."""
        while self._running or self._waiting:
            while self._waiting:
                engine = heapq.heappop(self._waiting).engine
                if not engine.done():
                    engine.set_result(None)
            running: defaultdict[EngineClient, list[str]] = defaultdict(list)
            for client, ids in self._running.values():
                running[client] += ids
            await asyncio.gather(*(_abort(client, ids) for client, ids in running.items()))
            # A request may have been on its way to the engine.
            await asyncio.sleep(_STOP_POLL_SECONDS)

    def lose(self, url: str) -> None:
        """Give the engine at this URL no more work. Its unfinished groups go to the others, before
        all later groups.

        Blocks, so not for coroutines on `loop`.
        """
        self.loop.run(self._lose(url))

    def use(self, urls: Collection[str]) -> None:
        """Give work only to the engines at these URLs, which have the current weights.

        Blocks, so not for coroutines on `loop`.
        """
        self.loop.run(self._use(urls))

    def busy_seconds(self) -> float:
        """Seconds in which engines had work, summed over engines."""
        now = self.loop.time()
        return sum(engine.busy_seconds(now) for engine in self._engines)

    def overdue(self, finished: int, wanted: int) -> TryAgain:
        """The error of a collection in which nothing arrived for rollout.collect_timeout_s."""
        return TryAgain(
            f"{finished} of {wanted} responses arrived, and then none for "
            f"rollout.collect_timeout_s={self._config.collect_timeout_s:g} s: raise it, or see the "
            f"engines' logs, the first of which is {self._engines[0].client.address.log_file}"
        )

    def close(self) -> None:
        """Cancel running requests and close all connections. The engines keep running."""
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
            if engine.url == url:
                engine.lost = True
                self._queue.update(engine)
                await engine.client.close()  # its requests fail now, not at their deadline

    async def _use(self, urls: Collection[str]) -> None:
        for engine in self._engines:
            engine.lost = engine.url not in urls
            self._queue.update(engine)
        self._give_out()

    def _give_up(self, engine: EngineLoad, error: TryAgain | EngineWrong) -> None:
        """Take an engine that failed out of rotation.

        Raises:
            TryAgain, EngineWrong: no other engine can do its work, now or later.
        """
        others_left = any(not other.lost for other in self._engines if other is not engine)
        if not self._are_replaced and not others_left:
            raise error
        if engine.lost:
            return
        engine.lost = True
        self._queue.update(engine)
        _logger.warning("engine removed from rotation until its weights are synced: %s", error)
        loop = asyncio.get_running_loop()
        if isinstance(error, EngineWrong) and self._are_replaced:
            # The engine still runs: its owner has to restart it.
            loop.run_in_executor(None, end_server, engine.client.address, str(error))
        # Its other requests fail now, not at their deadline.
        closing = loop.create_task(engine.client.close())
        self._closing.add(closing)  # asyncio itself keeps no reference to tasks
        closing.add_done_callback(self._closing.discard)

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

        limit = self.progress.limit(self._config.collect_timeout_s)
        try:
            async with limit, asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(sample_group(group)) for group in request.groups()]
        except TimeoutError:
            raise self.overdue(finished, request.num_samples) from None
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [sample for task in groups for sample in task.result()]

    async def _ask(
        self,
        engine: EngineLoad,
        number: int,
        group: GroupRequest,
        unfinished: Sequence[Sample],
    ) -> list[Completion]:
        """An engine's continuations of a group's unfinished samples."""
        prompts = [
            [*group.prompt.token_ids, *sample.response_ids.tolist()] for sample in unfinished
        ]
        params = [self._sampling_params(group, sample) for sample in unfinished]
        ids = [uuid.uuid4().hex for _ in unfinished]
        self._running[number] = (engine.client, ids)
        try:
            return await engine.client.generate(
                prompts, params, group.routed_experts, ids, group.goes_on
            )
        except asyncio.CancelledError:
            await asyncio.shield(_abort(engine.client, ids))
            raise
        finally:
            del self._running[number]

    async def _engine_for(self, number: int, group: GroupRequest) -> EngineLoad | None:
        """Wait for an engine with room and make the group its work. None: stop() was called."""
        waiting = _WaitingGroup(number, group, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._give_out()
        try:
            return await waiting.engine
        except asyncio.CancelledError:
            # The group may have been given to an engine before this task ran again.
            if not waiting.engine.cancelled():
                engine = waiting.engine.result()
                if engine is not None:
                    engine.remove(group, self.loop.time())
                    self._queue.update(engine)
                    self._give_out()
            raise

    def _give_out(self) -> None:
        """Give waiting groups, in their order, to engines with room."""
        while self._waiting:
            first = self._waiting[0]
            if not first.engine.cancelled():
                engine = self._queue.pick(first.group.samples, first.group.engine)
                if engine is None:
                    return
                engine.add(first.group, self.loop.time())
                self._queue.update(engine)
                first.engine.set_result(engine)
            heapq.heappop(self._waiting)

    def _check(
        self,
        address: EngineAddress,
        unfinished: Sequence[Sample],
        completions: Sequence[Completion],
        group: GroupRequest,
    ) -> None:
        """Raises EngineWrong if no engine with the group's weights could have written this."""
        expected = group.weight_version
        vocabulary = self._vocabulary
        for sample, completion in zip(unfinished, completions, strict=True):
            oldest = completion.weight_version_oldest
            newest = completion.weight_version
            if oldest < expected or (newest != expected and not group.goes_on):
                raise EngineWrong(
                    f"{address}: a response was made by weights of version {oldest} to {newest}, "
                    f"expected {expected}: the engine missed a weight sync"
                )
            ids = completion.token_ids
            room = group.room(len(sample.response_ids))
            if len(ids) > room:
                raise EngineWrong(
                    f"{address}: a response has {len(ids)} tokens, at most {room} were requested"
                )
            if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
                raise EngineWrong(
                    f"{address}: a response has token ids {ids.min()} to {ids.max()}, outside the "
                    f"vocabulary ({vocabulary})"
                )

    def _sampling_params(self, group: GroupRequest, sample: Sample) -> dict[str, Any]:
        params = {
            "temperature": group.sampling.temperature,
            "top_p": group.sampling.top_p,
            "max_new_tokens": group.room(len(sample.response_ids)),
            "stop_token_ids": self._stop_token_ids,
            "sampling_seed": sample.seed,  # used with rollout.deterministic only
        }
        if group.sampling.top_k is not None:
            params["top_k"] = group.sampling.top_k
        return params


def connect(
    engines: EnginePool, config: RolloutConfig, stop_token_ids: Sequence[int], vocabulary: int
) -> Dispatcher:
    """On rank 0: the dispatcher of a run's engines once they are ready; closed with them.

    Arguments: see Dispatcher.
    """
    dispatcher = Dispatcher(
        engines.addresses, config, stop_token_ids, are_replaced=True, vocabulary=vocabulary
    )
    engines.attach(dispatcher)
    return dispatcher


async def _abort(client: EngineClient, ids: Sequence[str]) -> None:
    with suppress(TryAgain, RunFailed, TimeoutError):  # the engine may be exiting
        async with asyncio.timeout(_ABORT_SECONDS):
            await client.abort(ids)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first error of several tasks."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
