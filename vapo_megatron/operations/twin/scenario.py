"""What a simulation is given, and an event loop whose clock jumps to the next thing that is to happen."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.engines.loop_thread import LoopThread


class EngineSpeed(Protocol):
    """How fast a server is."""

    @property
    def at_once(self) -> int:
        """Responses that it generates together; further ones wait."""
        ...

    def decode_seconds(self, running: float, context: float) -> float:
        """Of a step that adds a token to each running response, which have so many tokens on average."""
        ...

    def prefill_seconds(self, tokens: float) -> float:
        """Of reading a sequence; nothing else is generated meanwhile."""
        ...


@dataclass(frozen=True)
class Scenario:
    """A run to simulate; times in seconds.

    Attributes:
        rollout: staleness, partial responses, how many requests an engine takes.
        batch, sampling: what a step is made of.
        max_new_tokens: of a response.
        sync_mode: what becomes of responses under way at a weight sync.
        engines, speed: how many, each how fast.
        prompt_tokens: of every prompt.
        length_of: tokens of a response, by the number of its prompt in the data and its seed.
        trainer_seconds: of all that the trainer does with samples, by their tokens.
        sync_seconds: of a weight sync.
        grade_seconds, grade_workers: of a response; how many are graded at once.
        informative_share: of groups, with dynamic sampling.
        steps: to count, after those in which the run settles.
        seed: of everything.
    """

    rollout: RolloutConfig
    batch: BatchConfig
    sampling: DynamicSamplingConfig
    max_new_tokens: int
    sync_mode: Literal["wait", "retract", "in_place"]
    engines: int
    speed: EngineSpeed
    prompt_tokens: int
    length_of: Callable[[int, int], int]
    trainer_seconds: Callable[[int], float]
    sync_seconds: float
    grade_seconds: float
    grade_workers: int
    informative_share: float = 1.0
    steps: int = 10
    seed: int = 0


T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """What an event loop waits with: time passes at once instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            if timeout is None:
                raise RuntimeError("the simulation waits for what will never happen")
            self.now += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    """Work in threads is done at once, and its result is there when the seconds that it has said it takes are over."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self._clock = clock
        self.ends_at = 0.0

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, work: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        self.ends_at = self.time()
        result = work(*args)
        done: asyncio.Future[T] = self.create_future()

        def end() -> None:
            if not done.cancelled():
                done.set_result(result)

        self.call_at(self.ends_at, end)
        return done


class VirtualLoop(LoopThread):
    """Stands in for the thread that talks to engines. Nothing happens but while its caller waits for something."""

    def __init__(self) -> None:
        self._virtual = self._loop = _Loop(_Clock())

    def sleep(self, seconds: float) -> None:
        """Let time pass, and what falls into it happen."""
        self.run(asyncio.sleep(seconds))

    def call_at(self, time: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Call something at a time."""
        return self._loop.call_at(time, work)

    def ends_at(self, time: float) -> None:
        """For work in a thread: say when it is done."""
        self._virtual.ends_at = time

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """As LoopThread's; it goes on while somebody waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, future: "Future[T]", seconds: float) -> bool:
        """As LoopThread's."""
        timer = self._loop.call_later(seconds, self._loop.stop)
        future.add_done_callback(lambda _: self._loop.stop())
        self._loop.run_forever()
        timer.cancel()
        return future.done()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """As LoopThread's."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Cancel what still runs."""
        if not self._loop.is_closed():
            self.cancel_all()
            self._loop.close()
