"""Steps as `plan --simulate` says them beside steps that were measured.

    python -m benchmarks.twin [--only 3] [--side-by-side 5] [--rounds 2] [--json FILE]

Measured is what a run's own code takes by the wall clock: its ledger, stream and dispatcher, its client over HTTP to
stub engines on loopback, in another process. A stub writes no tokens: it goes through a batch token by token and
sleeps for as long as the rate that it is given says, so that twenty runs take minutes and hardly any of a core. Its
trainer and its verifiers sleep as well. What is compared is thus the scheduling and the arithmetic of the twin, not the
speed of anything. Each run is made --rounds times and the fastest counts: what else works on the cores can only slow
one. Rates and lengths are known to both sides; nothing is fitted. Runs differ in engines, staleness, what becomes of
responses at a weight sync, lengths, dynamic sampling, grading and updates.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web

from benchmarks.common import parser, publish
from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import AsynchronousConfig, PartialResponsesConfig, RolloutConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.engines.client import EngineClient, PauseMode
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.server import EngineAddress
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.twin.modes import ResponseLengths
from vapo_megatron.operations.twin.run import Outcome, SimulatedRollouts, simulate, steps
from vapo_megatron.operations.twin.scenario import Scenario

PROMPT, LONGEST, STEPS = 20, 300, 4


@dataclass(frozen=True)
class Rate:
    """Of an engine: seconds of a decoding step are a + b responses + c tokens of all of them, those of reading a prompt
    begin + read tokens."""

    at_once: int = 24
    a: float = 0.018
    b: float = 0.0003
    c: float = 5e-7
    read: float = 0.0006
    begin: float = 0.0

    def decode_seconds(self, running: float, context: float) -> float:
        """As EngineSpeed's."""
        return self.a + self.b * running + self.c * running * context

    def prefill_seconds(self, tokens: float) -> float:
        """As EngineSpeed's."""
        return self.begin + self.read * tokens if tokens else 0.0


RATE = Rate()


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

    @property
    def lengths(self) -> ResponseLengths:
        """Of its responses."""
        return ResponseLengths(Lengths(PROMPT, self.mean, LONGEST, PROMPT), self.spread)

    def scenario(self, rate: Rate = RATE) -> Scenario:
        """For the twin. rate: of its engines."""
        partial = PartialResponsesConfig(oversampling=1.5 if self.mode == "partial" else None)
        ahead = AsynchronousConfig(max_staleness=self.staleness)
        rollout = RolloutConfig(max_running_requests=rate.at_once, asynchronous=ahead, partial_responses=partial)
        return Scenario(
            rollout=rollout,
            batch=BatchConfig(prompts_per_step=16, samples_per_prompt=4),
            sampling=DynamicSamplingConfig(oversampling=1.5, max_rounds=4 if self.filtered else None),
            max_new_tokens=LONGEST,
            sync_mode=self.mode if self.mode in ("retract", "in_place") else "wait",  # type: ignore[arg-type]
            engines=self.engines,
            speed=rate,
            prompt_tokens=PROMPT,
            length_of=self.lengths.draw,
            trainer_seconds=lambda tokens: self.update * tokens / (64 * (PROMPT + self.mean)),
            sync_seconds=self.sync,
            grade_seconds=self.grade,
            grade_workers=4,
            informative_share=0.6 if self.filtered else 1.0,
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


class Stub:
    """An engine that goes through its batch token by token, and sleeps for each."""

    def __init__(self, length_of: Callable[[int, int], int]) -> None:
        self.length_of, self.version, self.paused = length_of, 0, False
        self.waiting: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.changed = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        """A request for the responses to one prompt."""
        body, entries = await request.json(), []
        call = {"left": len(body["rid"]), "done": asyncio.Event(), "read": False}
        for name, prompt, params in zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True):
            length = self.length_of(prompt[0], params["sampling_seed"]) - (len(prompt) - PROMPT)
            entries.append(
                {"name": name, "call": call, "had": len(prompt), "length": length, "spans": [], "reason": "stop"}
            )
        self.waiting += entries
        self.changed.set()
        await call["done"].wait()
        return web.Response(body=columns.pack([self.answer(one) for one in entries]), content_type=columns.MEDIA_TYPE)

    def answer(self, one: dict[str, Any]) -> dict[str, Any]:
        """As SGLang's."""
        start, spans = 0, []
        for version, count in one["spans"] or [(self.version, 0)]:
            spans.append({"version": str(version), "start": start, "end": start + count})
            start += count
        meta = {"finish_reason": {"type": one["reason"]}, "weight_versions": spans}
        return {"output_ids": [0] * start, "meta_info": meta | {"output_token_logprobs": [[0.0, 0, None]] * start}}

    def finish(self, one: dict[str, Any], reason: str) -> None:
        """One response is done."""
        one["reason"] = reason
        one["call"]["left"] -= 1
        if one["call"]["left"] == 0:
            one["call"]["done"].set()

    async def abort(self, request: web.Request) -> web.Response:
        """End responses, with what there is of them."""
        names = set(await request.json())
        for batch in (self.running, self.waiting):
            for one in [one for one in batch if one["name"] in names]:
                batch.remove(one)
                self.finish(one, "abort")
        return web.json_response({})

    async def pause(self, request: web.Request) -> web.Response:
        """Stop; retracted responses are read anew."""
        self.paused = True
        if (await request.json())["mode"] == "retract":
            for one in self.running:
                one["call"]["read"] = False
            self.waiting, self.running = self.running + self.waiting, []
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on."""
        self.paused = False
        self.changed.set()
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        """Weights of a version."""
        self.version = int((await request.json())["weight_version"])
        return web.json_response({"message": '{"problems": [], "seconds": 0, "checksums": []}'})

    def begin_waiting(self) -> float:
        """Start what there is room for; the seconds of reading it."""
        seconds = 0.0
        while self.waiting and len(self.running) < RATE.at_once:
            one = self.waiting.pop(0)
            written = sum(count for _, count in one["spans"])
            context = one["had"] + written
            seconds += RATE.prefill_seconds(context - (PROMPT if one["call"]["read"] else 0))
            one["call"]["read"] = True
            self.running.append(one)
        return seconds

    async def work(self) -> None:
        """For ever."""
        while True:
            now = time.monotonic()
            while not self.paused and (self.running or self.waiting):
                now += self.begin_waiting()
                tokens = sum(one["had"] + sum(count for _, count in one["spans"]) for one in self.running)
                batch = list(self.running)
                now += RATE.decode_seconds(len(batch), tokens / len(batch))
                await asyncio.sleep(max(0.0, now - time.monotonic()))
                for one in batch:
                    if one in self.running:  # not aborted, not retracted
                        self.write(one)
            self.changed.clear()
            await self.changed.wait()

    def write(self, one: dict[str, Any]) -> None:
        """A token."""
        spans = one["spans"]
        if spans and spans[-1][0] == self.version:
            spans[-1] = (self.version, spans[-1][1] + 1)
        else:
            spans.append((self.version, 1))
        if sum(count for _, count in spans) >= one["length"]:
            self.running.remove(one)
            self.finish(one, "stop")


def serve(cases: Sequence[Case], ports: Any) -> None:
    """The stub engines of some runs, until they are killed; puts the ports of each run."""

    async def start(case: Case) -> tuple[int, "asyncio.Task[None]"]:
        stub, application = Stub(case.lengths.draw), web.Application(client_max_size=1 << 30)
        application.router.add_post(f"/{columns.PATH}", stub.generate)
        application.router.add_post(f"/{columns.ABORT_PATH}", stub.abort)
        application.router.add_post("/pause_generation", stub.pause)
        application.router.add_post("/continue_generation", stub.resume)
        application.router.add_post("/update_weights_from_tensor", stub.load)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1]), asyncio.create_task(stub.work())

    async def run() -> None:
        started = [[await start(case) for _ in range(case.engines)] for case in cases]
        ports.put([[port for port, _ in stubs] for stubs in started])
        await asyncio.gather(*(task for stubs in started for _, task in stubs))

    asyncio.run(run())


class MeasuredEngines:
    """What Rollouts needs of training.engines.Engines, over servers that do not care what weights they get."""

    share_device, failures = False, 0

    def __init__(
        self,
        case: Case,
        scenario: Scenario,
        addresses: Sequence[EngineAddress],
        client: Callable[[EngineAddress, float], EngineClient] = EngineClient,
    ) -> None:
        self.version, self.count, self.case = -1, len(addresses), case
        self.sync_mode, self.collect_timeout_s = scenario.sync_mode, 600.0
        self.addresses = addresses
        self.dispatcher = Dispatcher(self.addresses, scenario.rollout, (0,), client=client)
        self.update_weights()

    def update_weights(self) -> None:
        """Pause, wait as long as a weight sync takes, go on."""
        self.version += 1
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode

        async def sync(address: EngineAddress) -> None:
            client = EngineClient(address, 60)
            await client.pause(pause)
            await asyncio.sleep(self.case.sync)
            await self.send_weights(client)
            await client.resume()
            await client.close()

        async def all_of_them() -> None:
            await asyncio.gather(*(sync(address) for address in self.addresses))

        asyncio.run(all_of_them())

    async def send_weights(self, client: EngineClient) -> None:
        """The weights, which are none."""
        await client.send_bucket([], version=self.version)


class Graded(SimulatedRollouts):
    """Rollouts whose verifiers sleep."""

    def begin_grading(self, scenario: Scenario) -> None:
        """Before begin()."""
        self._pool, self._sleep = ThreadPoolExecutor(scenario.grade_workers), scenario.grade_seconds

    def _grade(self, samples: Sequence[Sample]) -> None:
        list(self._pool.map(lambda _: time.sleep(self._sleep), samples))
        self.say_correct(samples)


def measure(case: Case, ports: Sequence[int]) -> Outcome:
    """The run by the wall clock."""
    scenario = case.scenario()
    addresses = [EngineAddress(f"http://127.0.0.1:{port}", "no log") for port in ports]
    return run_of(scenario, MeasuredEngines(case, scenario, addresses))


def run_of(scenario: Scenario, engines: MeasuredEngines) -> Outcome:
    """Its steps by the wall clock."""
    rollouts = Graded.of(scenario, engines)
    rollouts.begin_grading(scenario)
    try:
        return steps(scenario, engines, time.sleep, rollouts)
    finally:
        engines.dispatcher.close()


def row(number: int, case: Case, measured: Outcome, rate: Rate = RATE) -> dict[str, Any]:
    """Of the table."""
    said = simulate(case.scenario(rate))
    lengths = f"{case.mean}" if case.spread is None else f"{case.mean}, sigma {case.spread:g}"
    return {
        "run": number,
        "mode": case.mode + (", dynamic sampling" if case.filtered else ""),
        "staleness": case.staleness,
        "engines": case.engines,
        "length": lengths,
        "update": case.update,
        "measured, s": round(measured.step, 2),
        "simulated, s": round(said.step, 2),
        "error": f"{said.step / measured.step - 1:+.1%}",
        "idle, measured": f"{measured.engines_idle:.0%}",
        "idle, simulated": f"{said.engines_idle:.0%}",
        "age, measured": f"{measured.mean('rollout/age_mean'):.2f}",
        "age, simulated": f"{said.mean('rollout/age_mean'):.2f}",
    }


def main() -> None:
    """A row for each run."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", type=int, help="number of one run")
    arguments.add_argument("--side-by-side", type=int, default=5, help="runs at once: they sleep most of the time")
    arguments.add_argument("--rounds", type=int, default=2, help="of which the fastest counts")
    given: argparse.Namespace = arguments.parse_args()
    chosen = [(number, case) for number, case in enumerate(CASES, 1) if given.only in (None, number)]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    stubs = context.Process(target=serve, args=([case for _, case in chosen], queue), daemon=True)
    stubs.start()
    with ThreadPoolExecutor(given.side_by_side) as pool:
        cases, ports = [case for _, case in chosen], queue.get()
        rounds = [list(pool.map(measure, cases, ports)) for _ in range(given.rounds)]
    measured = [min(outcomes, key=lambda outcome: outcome.step) for outcomes in zip(*rounds, strict=True)]
    stubs.kill()
    rows = [row(number, case, found) for (number, case), found in zip(chosen, measured, strict=True)]
    worst = max(rows, key=lambda found: abs(float(found["error"].rstrip("%"))))["error"]
    title = f"seconds of a step in {len(rows)} runs, {STEPS} steps each after the first; the largest error is {worst}"
    publish(title, rows, given.json)


if __name__ == "__main__":
    main()
