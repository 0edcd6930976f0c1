"""A server that writes no tokens, but takes the time for it."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vapo_megatron.data.sample import FinishReason
from vapo_megatron.engines.client import Completion, EngineClient, PauseMode
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.errors import TryAgain
from vapo_megatron.operations.twin.scenario import Scenario, VirtualLoop

# Of a decoding step: times are floating point numbers.
_ROUNDING = 1e-6
# Of every response, as many as it has tokens; the pages are never touched.
_IDS, _LOGPROBS = np.zeros(1 << 24, dtype=np.int32), np.zeros(1 << 24, dtype=np.float32)


@dataclass(eq=False)
class _Call:
    """A request for responses to one prompt. left: that are not done; completions: by their place in it."""

    done: "asyncio.Future[list[Completion]]"
    left: int
    completions: dict[int, Completion] = field(default_factory=dict)
    has_read_prompt: bool = False


@dataclass(eq=False)
class _Response:
    """A response under way. It writes a token in each decoding step of the server.

    Attributes:
        name, call, place: whose it is.
        prompt: tokens that it came with, those of an earlier request for it included.
        length: tokens that it is to write.
        finish: why it ends there.
        written, counted: tokens written when it last began to run, and those that `versions` accounts for.
        began: decoding step in which that was; None: it waits.
        versions: of weights, each with the tokens that they wrote.
    """

    name: str
    call: _Call
    place: int
    prompt: int
    length: int
    finish: FinishReason
    written: int = 0
    counted: int = 0
    began: float | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)

    def mark(self, step: float, version: int) -> None:
        """All that is not accounted for yet was written by these weights."""
        now = self.written if self.began is None else self.written + int(step - self.began + _ROUNDING)
        if now > self.counted:
            self.versions.append((version, now - self.counted))
            self.counted = now

    def completion(self, finish: FinishReason, version: int) -> Completion:
        """With tokens and log-probs that say nothing, and take no memory."""
        versions = tuple(self.versions) or ((version, 0),)
        return Completion(
            _IDS[: self.counted], _LOGPROBS[: self.counted], finish, versions[0][0], versions[-1][0], versions=versions
        )


class SimulatedEngine(EngineClient):
    """What the dispatcher takes for the way to a server that batches continuously.

    As in SGLang, a prompt is read before anything else is decoded, once for all responses of a request, and those that
    wait begin as soon as others end.
    """

    def __init__(self, address: EngineAddress, scenario: Scenario, clock: VirtualLoop) -> None:
        super().__init__(address, 0.0)
        self._speed, self._prompt_tokens, self._length_of = scenario.speed, scenario.prompt_tokens, scenario.length_of
        self._clock = clock
        self._waiting: deque[_Response] = deque()
        self._running: list[tuple[float, int, _Response]] = []  # a heap by the step in which they end
        self._calls: set[_Call] = set()
        self._order = itertools.count()
        self._step, self._at = 0.0, 0.0  # decoding steps so far, and when there were so many
        self._offset = 0.0  # tokens of all that run, less the steps since there was nothing: it changes with who runs
        self._reads_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._weights = 0

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[dict[str, Any]],
        routed_experts: object = None,
        ids: Sequence[str] | None = None,
        unfinished: bool = False,
    ) -> list[Completion]:
        """As EngineClient's."""
        assert ids is not None
        call = _Call(asyncio.get_running_loop().create_future(), len(prompts))
        self._calls.add(call)
        for place, (name, prompt, params) in enumerate(zip(ids, prompts, sampling_params, strict=True)):
            left = self._length_of(prompt[0], params["sampling_seed"]) - (len(prompt) - self._prompt_tokens)
            most = params["max_new_tokens"]
            finish: FinishReason = "stop" if left < most else "length"
            self._waiting.append(_Response(name, call, place, len(prompt), max(1, min(left, most)), finish))
        self._change(lambda: None)
        return await call.done

    async def abort(self, ids: Sequence[str]) -> None:
        """As EngineClient's."""
        self._change(lambda: self._end(set(ids)))

    async def close(self) -> None:
        """As EngineClient's: what is asked for at this moment fails."""
        self._change(self._forget)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """As EngineClient's."""

        def stop() -> None:
            if mode == "abort":
                self._end({response.name for response in self._all()})
            elif mode == "retract":
                self._take_back()
            self._is_paused = True

        self._change(stop)

    async def resume(self, version: int = 0) -> None:
        """Go on, under weights of this version."""

        def go_on() -> None:
            self._mark_running()
            self._weights, self._is_paused = version, False

        self._change(go_on)

    def _change(self, change: Callable[[], None]) -> None:
        """Do something to who runs, now; what follows from it is waited for."""
        self._catch_up()
        change()
        self._begin_waiting()
        self._plan()

    def _catch_up(self) -> None:
        """Decode as far as time has come."""
        now = self._clock.time()
        start = max(self._at, min(self._reads_until, now))
        if self._running and not self._is_paused and now > start:
            count, context = len(self._running), self._context
            steps = 0.0
            for _ in range(4):  # a step takes the longer the more tokens there are
                steps = (now - start) / self._speed.decode_seconds(count, context + steps / 2)
            self._step = min(self._step + steps, self._running[0][0])
        self._at = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._is_paused:
            steps = self._running[0][0] - self._step
            seconds = steps * self._speed.decode_seconds(len(self._running), self._context + steps / 2)
            self._timer = self._clock.call_at(max(self._at, self._reads_until) + seconds, self._finish)

    def _finish(self) -> None:
        """The next of those that run are done."""
        self._timer, self._at, self._step = None, self._clock.time(), self._running[0][0]
        done = []
        while self._running and self._running[0][0] <= self._step + _ROUNDING:
            done.append(heapq.heappop(self._running)[2])
        for response in done:
            self._leave(response)
            self._complete(response, response.finish)
        self._begin_waiting()
        self._plan()

    @property
    def _context(self) -> float:
        """Tokens of a response that runs, on average."""
        return self._offset / len(self._running) + self._step

    def _begin_waiting(self) -> None:
        while self._waiting and not self._is_paused and len(self._running) < self._speed.at_once:
            response = self._waiting.popleft()
            context = response.prompt + response.written
            unread = context - (self._prompt_tokens if response.call.has_read_prompt else 0)
            response.call.has_read_prompt = True
            if unread:
                self._reads_until = max(self._at, self._reads_until) + self._speed.prefill_seconds(unread)
            response.began = self._step
            self._offset += context - self._step
            end = self._step + response.length - response.written
            heapq.heappush(self._running, (end, next(self._order), response))

    def _leave(self, response: _Response) -> None:
        """It does not run any more, and keeps what it has written."""
        assert response.began is not None
        self._offset -= response.prompt + response.written - response.began
        response.mark(self._step, self._weights)
        response.written, response.began = response.counted, None

    def _complete(self, response: _Response, finish: FinishReason) -> None:
        call = response.call
        call.completions[response.place] = response.completion(finish, self._weights)
        call.left -= 1
        if call.left == 0:
            self._calls.discard(call)
        if call.left == 0 and not call.done.done():
            call.done.set_result([call.completions[place] for place in sorted(call.completions)])

    def _all(self) -> Iterable[_Response]:
        return itertools.chain((entry[2] for entry in self._running), self._waiting)

    def _mark_running(self) -> None:
        for _, _, response in self._running:
            response.mark(self._step, self._weights)

    def _take_back(self) -> None:
        """Those that run wait again, first of all; what they have read and written is to be read anew."""
        running = [entry[2] for entry in sorted(self._running, key=lambda entry: entry[1])]
        self._running = []
        for response in running:
            self._leave(response)
            response.call.has_read_prompt = False
        self._waiting.extendleft(reversed(running))

    def _end(self, names: set[str]) -> None:
        ended = [response for response in self._all() if response.name in names]
        self._running = [entry for entry in self._running if entry[2].name not in names]
        heapq.heapify(self._running)
        self._waiting = deque(response for response in self._waiting if response.name not in names)
        for response in ended:
            if response.began is not None:
                self._leave(response)
            self._complete(response, "abort")

    def _forget(self) -> None:
        """Nothing is under way any more, and whoever waits for it is told."""
        self._running, self._waiting, self._offset = [], deque(), 0.0
        calls, self._calls = self._calls, set()
        for call in calls:
            if not call.done.done():
                call.done.set_exception(self._gone())

    def _gone(self) -> TryAgain:
        return TryAgain(f"{self.address.url}: the simulated engine is gone")


class SimulatedEngines:
    """What Rollouts needs of training.engines.Engines, over engines that a Dispatcher serves as it serves others.

    Attributes:
        version: of the last weight sync.
        count: of engines.
        share_device: Rollouts asks for it where the policy stands still.
    """

    share_device = False

    def __init__(self, scenario: Scenario) -> None:
        self.clock, self.count, self.sync_mode = VirtualLoop(), scenario.engines, scenario.sync_mode
        self.version, self._scenario = 0, scenario
        addresses = [EngineAddress(f"http://engine{number}", "no log") for number in range(self.count)]
        self._engines = {address: SimulatedEngine(address, scenario, self.clock) for address in addresses}
        self.dispatcher = Dispatcher(
            addresses,
            scenario.rollout,
            (),
            are_replaced=True,
            loop=self.clock,
            client=lambda address, _: self._engines[address],
        )

    @property
    def collect_timeout_s(self) -> float:
        """As Engines'."""
        return self._scenario.rollout.collect_timeout_s

    def update_weights(self) -> None:
        """All get weights of the next version."""
        self.version += 1
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode
        for engine in self._engines.values():
            self.clock.run(engine.pause(pause))
        self.clock.sleep(self._scenario.sync_seconds)
        for engine in self._engines.values():
            self.clock.run(engine.resume(self.version))
        self.dispatcher.use([engine.address.url for engine in self._engines.values()])

    def close(self) -> None:
        """End all."""
        self.dispatcher.close()
