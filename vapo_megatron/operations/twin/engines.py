"""The simulated engines of a run: they get weights, they die and come back."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.operations.twin.engine import EngineSpeed, SimulatedEngine
from vapo_megatron.operations.twin.virtual_loop import VirtualLoop
from vapo_megatron.rollout.client import PauseMode
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.server import EngineAddress


@dataclass(frozen=True)
class Failures:
    """How often an engine dies, and how long it takes until another one is in its place."""

    mean_seconds: float
    restart_seconds: float
    seed: int = 0


class SimulatedEngines:
    """What Rollouts needs of training.engines.Engines, over engines that a Dispatcher serves as it serves others.

    Attributes:
        version: of the last weight sync.
        count: of engines.
        failures: of engines, so far.
        share_device: Rollouts asks for it where the policy stands still.
    """

    share_device = False

    def __init__(
        self,
        config: RolloutConfig,
        count: int,
        speed: EngineSpeed,
        prompt_tokens: int,
        length_of: Callable[[int, int], int],
        sync_mode: Literal["wait", "retract", "in_place"],
        sync_seconds: float,
        failures: Failures | None = None,
    ) -> None:
        """sync_seconds: of a weight sync, in which the engines write nothing."""
        self.clock, self.count, self.sync_mode, self.version, self.failures = VirtualLoop(), count, sync_mode, 0, 0
        self._config, self._sync_seconds, self._failing = config, sync_seconds, failures
        addresses = [EngineAddress(f"http://engine{number}", "no log") for number in range(count)]
        self._engines = {
            address: SimulatedEngine(address, speed, prompt_tokens, length_of, self.clock) for address in addresses
        }
        self.dispatcher = Dispatcher(
            addresses, config, (), are_replaced=True, loop=self.clock, client=lambda address, _: self._engines[address]
        )
        self.dispatcher.when_stranded = lambda: self._sync(self.version)
        if failures is not None:
            for number, engine in enumerate(self._engines.values()):
                self._let_fail(engine, random.Random(f"{failures.seed}/{number}"), failures)

    @property
    def collect_timeout_s(self) -> float:
        """As Engines'."""
        return self._config.collect_timeout_s

    def update_weights(self) -> None:
        """Those that are up get weights of the next version."""
        self.version += 1
        self._sync(self.version)

    def _sync(self, version: int) -> None:
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode
        while not (fed := [engine for engine in self._engines.values() if engine.is_up]):
            self.clock.sleep(1.0)
        for engine in fed:
            self.clock.run(engine.pause(pause))
        self.clock.sleep(self._sync_seconds)
        for engine in fed:
            self.clock.run(engine.resume(version))
        self.dispatcher.use([engine.address.url for engine in fed if engine.is_up])

    def _let_fail(self, engine: SimulatedEngine, chance: random.Random, failures: Failures) -> None:
        def die() -> None:
            self.failures += 1
            engine.fail()
            self.clock.call_at(self.clock.time() + failures.restart_seconds, come_back)

        def come_back() -> None:
            engine.is_up = True
            self.clock.call_at(self.clock.time() + chance.expovariate(1 / failures.mean_seconds), die)

        come_back()

    def close(self) -> None:
        """End all."""
        self.dispatcher.close()
