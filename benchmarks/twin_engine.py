"""Steps as `plan --simulate` says them beside steps that real engines of this machine took.

    python -m benchmarks.twin_engine [--mean 60] [--only 1 2 3] [--json FILE]

As benchmarks.twin, with SGLang in the place of its stubs: a random model (0.85 M parameters), whose responses are as
long as the case says. How long a decoding step takes by the responses that run, and reading by tokens, is fitted to so
many responses of one length at once, before and after each run, on as many engines at a time as the run has; what it
costs that responses begin while others run, to one synchronous run more, made before. Nothing of a run in the table
goes into what is said of it. "drift" is the seconds of a full batch's decoding step after the run over those before:
what the machine itself did meanwhile. Trainer, verifiers and weight syncs sleep, so that they take none of the engines'
cores; a sync pauses engines and sends nothing.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collection import engines
from benchmarks.common import parser, publish
from benchmarks.step_beside_trl import make_inputs
from benchmarks.twin import PROMPT, RATE, Case, MeasuredEngines, Rate, row, run_of
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.client import Completion, EngineClient
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.operations.twin.run import Outcome, simulate

LENGTH, AT_ONCE = 50, (1, 8, 24)


class Paced(EngineClient):
    """Asks for responses of the lengths that a case says, whatever the model would write."""

    case: Case

    async def generate(self, prompts: Sequence[Sequence[int]], params: Any, *others: Any) -> list[Completion]:
        """As EngineClient's."""
        sent = []
        for prompt, given in zip(prompts, params, strict=True):
            left = self.case.lengths.draw(prompt[0], given["sampling_seed"]) - (len(prompt) - PROMPT)
            most = max(1, min(given["max_new_tokens"], left))
            sent.append(given | {"max_new_tokens": most, "ignore_eos": True, "stop_token_ids": []})
        words = [[3 + token % 250 for token in prompt] for prompt in prompts]
        return await super().generate(words, sent, *others)


class RealEngines(MeasuredEngines):
    """Whose weights stay what they are: they are only paused."""

    async def send_weights(self, client: EngineClient) -> None:
        """Nothing."""
        self.version = 0


async def seconds_of(addresses: Sequence[EngineAddress], count: int, length: int) -> float:
    """Of so many responses of a length at once on each of some engines; the mean over engines."""

    async def on(address: EngineAddress, number: int) -> float:
        client = EngineClient(address, 600)
        params = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True, "sampling_seed": number}
        random = np.random.default_rng(time.time_ns())  # prompts that no engine has read
        prompts = [random.integers(3, 250, PROMPT).tolist() for _ in range(count)]
        start = time.perf_counter()
        await client.generate(prompts, [params] * count)
        took = time.perf_counter() - start
        await client.close()
        return took

    return float(np.mean(await asyncio.gather(*(on(*pair[::-1]) for pair in enumerate(addresses)))))


def calibrate(addresses: Sequence[EngineAddress], rounds: int = 2) -> Rate:
    """The rate of engines that all work, with nothing for responses that begin while others run."""

    def median(count: int, length: int) -> float:
        return float(np.median([asyncio.run(seconds_of(addresses, count, length)) for _ in range(rounds)]))

    first = {count: median(count, 1) for count in AT_ONCE}
    read = max(0.0, np.polyfit(np.array(AT_ONCE) * PROMPT, list(first.values()), 1)[0])
    steps = [(median(count, LENGTH) - first[count]) / (LENGTH - 1) for count in AT_ONCE]
    b, a = np.polyfit(AT_ONCE, steps, 1)
    return Rate(RATE.at_once, float(a), float(b), 0.0, float(read))


@dataclass(frozen=True)
class Run:
    """What it was like, how fast the engines were around it, and how much slower after it."""

    outcome: Outcome
    rate: Rate
    drift: float


def measured(case: Case, servers: Sequence[EngineAddress], begin: float = 0.0) -> Run:
    """The run by the wall clock."""
    addresses = servers[: case.engines]
    kind = type("PacedCase", (Paced,), {"case": case})
    before = calibrate(addresses)
    scenario = case.scenario(before)
    outcome = run_of(scenario, RealEngines(case, scenario, addresses, kind))
    after, full = calibrate(addresses), RATE.at_once
    a, b, read = ((getattr(before, name) + getattr(after, name)) / 2 for name in ("a", "b", "read"))
    drift = after.decode_seconds(full, 0) / before.decode_seconds(full, 0)
    return Run(outcome, Rate(full, a, b, 0.0, read, begin), drift)


def seconds_to_begin(engines: int, mean: int, servers: Sequence[EngineAddress]) -> float:
    """So many that one run is said to take as long as it took."""
    case = Case(engines, "synchronous", 0, mean, 0.5, 0.5, sync=0.2)
    run, low, high = measured(case, servers), 0.0, 0.1
    for _ in range(10):
        middle = (low + high) / 2
        is_short = simulate(case.scenario(replace(run.rate, begin=middle))).step < run.outcome.step
        low, high = (middle, high) if is_short else (low, middle)
    return low


def cases(mean: int) -> list[Case]:
    """Runs that differ in engines, staleness, what becomes of responses at a weight sync, lengths and updates."""
    return [
        Case(1, "synchronous", 0, mean, 0.8, 1, sync=0.2),
        Case(2, "synchronous", 0, mean, 0.8, 1, sync=0.2),
        Case(2, "synchronous", 0, 2 * mean, None, 1, sync=0.2),
        Case(1, "partial", 0, mean, 0.8, 1, sync=0.2),
        Case(1, "wait", 1, mean, 0.8, 2, sync=0.2),
        Case(2, "wait", 2, mean, 0.8, 1, sync=0.2),
        Case(1, "retract", 1, mean, 0.8, 1, sync=0.2),
        Case(2, "retract", 2, 2 * mean, None, 2, sync=0.2),
        Case(1, "in_place", 1, mean, 0.8, 3, sync=0.2),
        Case(2, "in_place", 2, mean, 0.8, 1, sync=0.2),
    ]


def main() -> None:
    """A row for each run."""
    arguments = parser(__doc__)
    arguments.add_argument("--mean", type=int, default=60, help="tokens of a response, in most cases")
    arguments.add_argument("--only", type=int, nargs="*", default=[], help="numbers of some runs")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, 4, PROMPT)
        config = RolloutConfig(num_engines=2, context_length=512, max_running_requests=RATE.at_once)
        with engines(folder, 2, config) as servers:
            addresses = [server.address for server in servers]
            calibrate(addresses, 1)  # what is slow the first time
            begin = {count: seconds_to_begin(count, given.mean, addresses) for count in (1, 2)}
            rows = []
            for number, case in enumerate(cases(given.mean), 1):
                if number in (given.only or [number]):
                    run = measured(case, addresses, begin[case.engines])
                    said = row(number, case, run.outcome, run.rate)
                    del said["age, measured"], said["age, simulated"]  # weights stay what they are
                    decode = f"{run.rate.a * 1e3:.1f} + {run.rate.b * 1e3:.2f} n"
                    rows.append(said | {"decoding step, ms": decode, "drift": f"{run.drift:.2f}"})
                    print(f"run {number}: {said['error']}, drift {run.drift:.2f}", flush=True)
    for count, seconds in begin.items():
        print(f"{count} engine(s): a prompt takes {seconds * 1e3:.1f} ms beside its tokens")
    worst = max(rows, key=lambda found: abs(float(found["error"].rstrip("%"))))["error"]
    publish(f"seconds of a step in {len(rows)} runs on real engines; the largest error is {worst}", rows, given.json)


if __name__ == "__main__":
    main()
