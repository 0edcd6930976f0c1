"""What a simulation is given: a run's scheduling, and the seconds that everything takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig


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
class Failures:
    """How often an engine dies, and how long it takes until another one is in its place."""

    mean_seconds: float
    restart_seconds: float
    seed: int = 0


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
        failures: of engines.
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
    failures: Failures | None = None
    steps: int = 10
    seed: int = 0
