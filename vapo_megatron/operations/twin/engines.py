"""The simulated engines of a run: they get weights, they die and come back."""

import random

from vapo_megatron.engines.client import PauseMode
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.operations.twin.engine import SimulatedEngine
from vapo_megatron.operations.twin.scenario import Failures, Scenario
from vapo_megatron.operations.twin.virtual_loop import VirtualLoop


class SimulatedEngines:
    """What Rollouts needs of training.engines.Engines, over engines that a Dispatcher serves as it serves others.

    Attributes:
        version: of the last weight sync.
        count: of engines.
        failures: of engines, so far.
        share_device: Rollouts asks for it where the policy stands still.
    """

    share_device = False

    def __init__(self, scenario: Scenario) -> None:
        self.clock, self.count, self.sync_mode = VirtualLoop(), scenario.engines, scenario.sync_mode
        self.version, self.failures, self._scenario = 0, 0, scenario
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
        self.dispatcher.when_stranded = lambda: self._sync(self.version)
        if (failing := scenario.failures) is not None:
            for number, engine in enumerate(self._engines.values()):
                self._let_fail(engine, random.Random(f"{failing.seed}/{number}"), failing)

    @property
    def collect_timeout_s(self) -> float:
        """As Engines'."""
        return self._scenario.rollout.collect_timeout_s

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
        self.clock.sleep(self._scenario.sync_seconds)
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
