"""Compares steps simulated by `plan --simulate` with measured steps.

    python -m benchmarks.twin [--only 3] [--side-by-side 5] [--rounds 2] [--json FILE]

Measured is the wall-clock time of a run's own code: its ledger, stream and dispatcher, its client
over HTTP to stub engines on loopback, in another process. A stub generates no tokens: it goes
through a batch token by token and sleeps as long as the given rate says, so that twenty runs take
minutes and hardly any CPU time. The trainer and the verifiers sleep as well. So the scheduling and
the arithmetic of the simulation are compared, not the speed of anything. Each run is made --rounds
times and the fastest counts: other work on the cores can only slow a run down. Rates and lengths
are known to both sides; nothing is fitted. Runs differ in engines, staleness, treatment of
responses at a weight sync, lengths, dynamic sampling, grading and updates.
"""

import argparse
import asyncio
import hashlib
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist, mean
from typing import Any, Literal, cast

import numpy as np

from benchmarks.common import parser, publish
from benchmarks.stub_engines import AT_ONCE, PROMPT, decode_seconds, prefill_seconds, serve
from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import (
    AsynchronousConfig,
    PartialResponsesConfig,
    RolloutConfig,
    SamplingConfig,
)
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, PauseMode
from vapo_megatron.operations.plan.rollout import BETWEEN_PROMPTS
from vapo_megatron.operations.plan.simulation import Outcome, Scenario, simulate
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import StepRule, step_rule
from vapo_megatron.rollout.request import response_seed
from vapo_megatron.training.rollouts import Rollouts, age_metrics

LONGEST, STEPS, RESPONSES, GRADERS = 300, 4, 4, 4
_NORMAL = NormalDist()


@cache
def prompts() -> PromptSource:
    """Made-up prompts; dynamic sampling keeps three of five."""
    numbers = range(4096)
    informative = [int((number + 1) * 0.6) > int(number * 0.6) for number in numbers]
    ids = [(number, *[0] * (PROMPT - 1)) for number in numbers]
    made = [
        Prompt(str(n), "", str(kept), tokens)
        for n, kept, tokens in zip(numbers, informative, ids, strict=True)
    ]
    return PromptSource(made, 0)


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses. spread: sigma of a log-normal distribution cut at LONGEST; None:
    LONGEST * u^a."""

    mean: int
    spread: float | None

    def draw(self, prompt: int, seed: int) -> int:
        """Tokens of the response to a prompt with a seed; those to one prompt are long together."""
        place = math.sqrt(BETWEEN_PROMPTS) * _normal(prompt) + math.sqrt(
            1 - BETWEEN_PROMPTS
        ) * _normal(seed)
        if self.spread is None:
            length = LONGEST * _NORMAL.cdf(place) ** (LONGEST / self.mean - 1)
        else:
            length = self._median * math.exp(self.spread * place)
        return max(1, min(LONGEST, round(length)))

    @cached_property
    def _median(self) -> float:
        assert self.spread is not None
        low, high = 0.0, float(LONGEST)
        for _ in range(60):
            middle = (low + high) / 2
            edge = math.log(LONGEST / middle) / self.spread
            below = middle * math.exp(self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
            is_short = below + LONGEST * (1 - _NORMAL.cdf(edge)) < self.mean
            low, high = (middle, high) if is_short else (low, middle)
        return high


def _normal(number: int) -> float:
    """A standard normal number that follows from another one."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return _NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2**64)


@dataclass(frozen=True)
class Case:
    """A run to measure; seconds are of an update, a weight sync and a grade. spread: of lengths."""

    engines: int
    mode: Literal["synchronous", "partial", "wait", "retract", "in_place"]
    staleness: int
    mean: int
    spread: float | None
    update: float
    sync: float = 0.5
    grade: float = 0.015
    filtered: bool = False

    @cached_property
    def lengths(self) -> Lengths:
        """Of its responses."""
        return Lengths(self.mean, self.spread)

    @property
    def rollout(self) -> RolloutConfig:
        """The section of the config."""
        partial = PartialResponsesConfig(oversampling=1.5 if self.mode == "partial" else None)
        ahead = AsynchronousConfig(max_staleness=self.staleness)
        return RolloutConfig(
            max_running_requests=AT_ONCE, asynchronous=ahead, partial_responses=partial
        )

    def rule(self, steps: int) -> StepRule:
        """What makes a step."""
        sampling = DynamicSamplingConfig(oversampling=1.5, max_rounds=4 if self.filtered else None)
        return step_rule(
            BatchConfig(prompts_per_step=16, samples_per_prompt=RESPONSES),
            sampling,
            steps,
            self.rollout,
        )

    @property
    def sync_mode(self) -> Any:
        """What becomes of responses at a weight sync."""
        return self.mode if self.mode in ("retract", "in_place") else "wait"

    def trainer_seconds(self, tokens: float) -> float:
        """Of the trainer, by a step's tokens."""
        return self.update * tokens / (16 * RESPONSES * (PROMPT + self.mean))

    def lengths_of(self, number: int) -> np.ndarray:
        """Of the group with this number."""
        prompt = prompts().at(number).token_ids[0]
        return np.array(
            [self.lengths.draw(prompt, response_seed(0, number, i)) for i in range(RESPONSES)],
            float,
        )

    @property
    def scenario(self) -> Scenario:
        """For the simulation."""
        return Scenario(
            rule=self.rule(1),
            sync_mode=self.sync_mode,
            engines=self.engines,
            at_once=AT_ONCE,
            decode_seconds=decode_seconds,
            prefill_seconds=prefill_seconds,
            prompt_tokens=PROMPT,
            lengths_of=self.lengths_of,
            trainer_seconds=self.trainer_seconds,
            sync_seconds=self.sync,
            grade_seconds=self.grade,
            grade_workers=GRADERS,
            tick=0.02,
            is_informative=lambda number: prompts().at(number).answer == "True",
            steps=STEPS,
        )


CASES = (
    Case(1, "synchronous", 0, 100, None, 3),
    Case(2, "synchronous", 0, 100, 0.8, 3),
    Case(4, "synchronous", 0, 60, 1.0, 1.5),
    Case(2, "synchronous", 0, 100, 0.8, 4.5, grade=0.12),
    Case(2, "synchronous", 0, 80, 0.5, 1.5, filtered=True),
    Case(1, "partial", 0, 100, 0.8, 3),
    Case(2, "partial", 0, 100, 1.0, 3),
    Case(4, "partial", 0, 150, None, 4.5),
    Case(1, "wait", 1, 100, None, 3),
    Case(2, "wait", 1, 100, 0.8, 6),
    Case(4, "wait", 1, 60, 1.0, 4.5),
    Case(2, "wait", 2, 100, 0.8, 4.5),
    Case(1, "retract", 1, 100, 0.8, 9),
    Case(2, "retract", 1, 100, 1.0, 4.5),
    Case(4, "retract", 2, 150, None, 4.5),
    Case(2, "retract", 1, 80, 0.5, 3, filtered=True),
    Case(1, "in_place", 1, 60, 0.8, 4.5),
    Case(2, "in_place", 1, 100, 0.8, 9, sync=1.5),
    Case(4, "in_place", 2, 100, 1.0, 3, grade=0.075),
    Case(2, "in_place", 4, 100, 0.8, 4.5),
)


class MeasuredEngines:
    """What Rollouts needs of EnginePool and EngineWeights, over servers that do not care what
    weights they get."""

    share_device, failures, collect_timeout_s = False, 0, 600.0

    def __init__(self, case: Case, addresses: Sequence[EngineAddress]) -> None:
        self.version, self.count, self.case, self.addresses = -1, len(addresses), case, addresses
        self.sync_mode = case.sync_mode
        self.dispatcher = Dispatcher(addresses, case.rollout, (0,))
        self.update_weights()

    def update_weights(self) -> None:
        """Pause, wait as long as a weight sync takes, go on."""
        version = self.version + 1
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode

        async def sync(address: EngineAddress) -> None:
            client = EngineClient(address, 60)
            await client.pause(pause)
            await asyncio.sleep(self.case.sync)
            await client.send_bucket([], version=version)
            await client.resume()
            await client.close()

        async def all_of_them() -> None:
            await asyncio.gather(*(sync(address) for address in self.addresses))

        asyncio.run(all_of_them())
        self.version = version


class SleepingRollouts(Rollouts):
    """Rollouts whose verifiers sleep."""

    @classmethod
    def of(cls, case: Case, engines: MeasuredEngines) -> "SleepingRollouts":
        """Of a case."""
        nobody, sampling = cast(Any, None), SamplingConfig(max_new_tokens=LONGEST)
        pool = cast(Any, engines)
        rollouts = cls(pool, pool, nobody, sampling, RewardConfig(), 0, prompts=prompts())
        rollouts.use(engines.dispatcher)
        rollouts._sleep, rollouts._pool = case.grade, ThreadPoolExecutor(GRADERS)
        return rollouts

    _sleep: float
    _pool: ThreadPoolExecutor

    def _grade(self, samples: Sequence[Sample]) -> None:
        list(self._pool.map(lambda _: time.sleep(self._sleep), samples))
        for sample in samples:
            sample.correct = sample.prompt.answer == "True" and sample.index == 0


class _Silent:
    """What Rollouts asks of a recorder between the steps."""

    timer = staticmethod(lambda _: nullcontext())


def measure(case: Case, ports: Sequence[int]) -> Outcome:
    """The run by the wall clock, as training/loop.py goes through its steps."""
    engines = MeasuredEngines(
        case, [EngineAddress(f"http://127.0.0.1:{port}", "no log") for port in ports]
    )
    rollouts, outcome, settled = (
        SleepingRollouts.of(case, engines),
        Outcome(),
        2 + case.rule(1).oldest,
    )
    # There is a step beyond the last one, for which engines work ahead as for any other.
    rollouts.begin(case.rule(2 * (settled + STEPS)), RESPONSES, 0)
    stream, taken = rollouts.stream, time.monotonic()
    assert stream is not None
    for step in range(settled + STEPS):
        samples = [sample for group in stream.take(lambda _: None) for sample in group]
        taken, seconds = time.monotonic(), time.monotonic() - taken
        tokens = sum(len(sample.response_ids) for sample in samples)
        if step >= settled:
            outcome.seconds.append(seconds)
            outcome.tokens.append(tokens)
            outcome.ages.append(age_metrics(samples, engines.version)["rollout/age_mean"])
        time.sleep(case.trainer_seconds(tokens + len(samples) * PROMPT))
        rollouts.prepare_sync(cast(Any, _Silent()))
        engines.update_weights()
        rollouts.advance()
    rollouts.end()
    engines.dispatcher.close()
    return outcome


def row(number: int, case: Case, measured: float, age: float) -> dict[str, Any]:
    """Of the table."""
    simulated = simulate(case.scenario)
    lengths = f"{case.mean}" if case.spread is None else f"{case.mean}, sigma {case.spread:g}"
    return {
        "run": number,
        "mode": case.mode + (", dynamic sampling" if case.filtered else ""),
        "staleness": case.staleness,
        "engines": case.engines,
        "length": lengths,
        "update": case.update,
        "measured, s": round(measured, 2),
        "simulated, s": round(simulated.step, 2),
        "error": f"{simulated.step / measured - 1:+.1%}",
        "age, measured": f"{age:.2f}",
        "age, simulated": f"{mean(simulated.ages):.2f}",
    }


def main() -> None:
    """A row for each run."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", type=int, help="number of one run")
    arguments.add_argument(
        "--side-by-side", type=int, default=5, help="runs at once: they sleep most of the time"
    )
    arguments.add_argument("--rounds", type=int, default=2, help="of which the fastest counts")
    given: argparse.Namespace = arguments.parse_args()
    chosen = [
        (number, case) for number, case in enumerate(CASES, 1) if given.only in (None, number)
    ]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    engines = [[case.lengths.draw] * case.engines for _, case in chosen]
    stubs = context.Process(target=serve, args=(engines, queue), daemon=True)
    stubs.start()
    with ThreadPoolExecutor(given.side_by_side) as pool:
        cases, ports = [case for _, case in chosen], queue.get()
        rounds = [list(pool.map(measure, cases, ports)) for _ in range(given.rounds)]
    measured = [
        min(outcomes, key=lambda outcome: outcome.step) for outcomes in zip(*rounds, strict=True)
    ]
    stubs.kill()
    rows = [
        row(n, case, found.step, mean(found.ages))
        for (n, case), found in zip(chosen, measured, strict=True)
    ]
    worst = max(rows, key=lambda found: abs(float(found["error"].rstrip("%"))))["error"]
    title = (
        f"seconds of a step in {len(rows)} runs, {STEPS} steps each after the first; the largest "
        f"error is {worst}"
    )
    publish(title, rows, given.json)


if __name__ == "__main__":
    main()
