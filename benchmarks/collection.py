"""A collection with its grading against the bare engine, in one run.

    python -m benchmarks.collection [--prompts 32] [--group 8] [--engines 2] [--json FILE]

A random model (0.85 M parameters, or another of --model) on real engines of this machine, which on
a GPU share it. "bare" sends requests for the responses, as many at once, and reads only the length
of each answer; "collected" is what a step does: groups are drawn by the ledger, spread over the
engines, decoded and graded by the verifier while others are generated, and put in order. "not
graded" is the same without grading. All send the same prompts with the same seeds, again and again:
each gets the same tokens, and engines have read the prompts before. Every response gives a number
as its answer. With "a straggler" one engine answers each group --delay seconds late, on both sides.
With "a failing engine" one of them refuses its first request and gets nothing more: its groups move
to the remaining engines; the "bare" baseline uses only those from the start. Sides take turns. "s
of rank 0" is CPU time of the collecting process per step.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import in_turns, parser, publish, ratio_figure
from benchmarks.training_runs import MODELS, make_inputs
from vapo_megatron.config.data import DataConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.prompts import PromptSource, train_prompts
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.client import Completion, EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.request import GroupRequest, response_seed
from vapo_megatron.rollout.stream import GroupStream, Work

EOS, SEED = 2, 1
FAILS = float("inf")


class Late(EngineClient):
    """A client whose answers come late, or never."""

    delay = 0.0

    async def generate(self, *args: Any, **options: Any) -> list[Completion]:
        if self.delay == FAILS:
            raise TryAgain("it fails, as it was told to")
        answer = await super().generate(*args, **options)
        await asyncio.sleep(self.delay)
        return answer


class Bench:
    """The ways to get the responses to the first prompts. tokens, cores: what each got, and seconds
    of cores."""

    def __init__(
        self, servers: list[EngineServer], given: argparse.Namespace, folder: Path
    ) -> None:
        self.given = given
        self.config = rollout_config(given)
        self.addresses = [server.address for server in servers]
        self.sampling = SamplingConfig(max_new_tokens=given.longest)
        data = DataConfig(train=folder / "train.jsonl", max_prompt_tokens=given.prompt)
        self.tokenizer = TextTokenizer(folder / "model", data.prompt)
        self.prompts = PromptSource(train_prompts(data, self.tokenizer), SEED, True)
        self.tokens: set[int] = set()
        self.cores: dict[str, list[float]] = {}

    def timed(self, name: str, way: Callable[[], int]) -> None:
        """Once."""
        start = time.process_time()
        self.tokens.add(way())
        self.cores.setdefault(name, []).append(time.process_time() - start)

    def decode(self, token_ids: Any) -> str:
        """With an answer behind it."""
        return f"{self.tokenizer.decode(token_ids)}\nAnswer: {len(token_ids) % 9}"

    def bare(self, delay: float) -> int:
        """As many groups at once as the dispatcher has in flight: all."""
        prompts = [self.prompts.at(number) for number in range(self.given.prompts)]

        async def run() -> int:
            clients = [Late(address, 600) for address in self.addresses[int(delay == FAILS) :]]
            clients[0].delay = 0.0 if delay == FAILS else delay
            params = {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": self.given.longest,
            }
            params["stop_token_ids"] = [EOS]

            async def group(number: int, prompt: Prompt) -> int:
                seeds = [
                    response_seed(SEED, prompt.cursor, index) for index in range(self.given.group)
                ]
                seeded = [params | {"sampling_seed": seed} for seed in seeds]
                found = await clients[number % len(clients)].generate(
                    [prompt.token_ids] * self.given.group, seeded
                )
                return sum(len(one.token_ids) for one in found)

            counts = await asyncio.gather(*(group(*pair) for pair in enumerate(prompts)))
            for client in clients:
                await client.close()
            return sum(counts)

        return asyncio.run(run())

    def collected(self, delay: float, pool: VerifierPool | None) -> int:
        """A step's collection; without a pool nothing is graded."""

        def request(prompt: Prompt) -> GroupRequest:
            return GroupRequest(
                prompt, self.given.group, self.sampling, self.given.longest, SEED, 0
            )

        def grade(group: list[Sample]) -> None:
            if pool is not None:
                grade_samples(group, pool, self.decode, RewardConfig())

        rule = StepRule(self.given.prompts, 1)
        work = Work(request, grade, lambda group: True, self.given.prompts * self.given.group, 600)
        with Dispatcher(self.addresses, self.config, [EOS]) as dispatcher:
            first = dispatcher._engines[0]
            first.client = Late(self.addresses[0], 600)
            first.client.delay = delay
            stream = GroupStream(dispatcher, self.prompts, Ledger(rule), work)
            groups = stream.take(lambda responses: None)
            stream.close()
        return sum(len(sample.response_ids) for group in groups for sample in group)


def rollout_config(given: argparse.Namespace) -> RolloutConfig:
    """Of all engines; on a GPU they share its memory."""
    return RolloutConfig(
        num_engines=given.engines,
        context_length=given.prompt + given.longest + 368,
        **({"mem_fraction_static": 0.6 / given.engines} if current_platform().is_cuda else {}),
    )


@contextmanager
def engines(
    folder: Path, count: int, config: RolloutConfig, dtype: str
) -> Iterator[list[EngineServer]]:
    """So many servers of the model of make_inputs."""
    devices = [0] if current_platform().is_cuda else None
    servers = [
        EngineServer(folder / "model", config, dtype, folder / f"engine{n}.log", devices)
        for n in range(count)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    """A row for each way."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=MODELS, default="1m")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    arguments.add_argument("--group", type=int, default=8)
    arguments.add_argument("--longest", type=int, default=128)
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--delay", type=float, default=0.5)
    arguments.add_argument("--repeats", type=int, default=7)
    given = arguments.parse_args()
    if given.engines < 2:
        arguments.error("--engines: at least 2, for one of them fails")
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as name, VerifierPool(RewardConfig(workers=1)) as pool:
        folder = Path(name)
        make_inputs(folder, given.prompts, given.prompt, given.model, given.dtype)
        config = rollout_config(given)
        with engines(folder, given.engines, config, given.dtype) as servers:
            bench = Bench(servers, given, folder)
            for what, delay in (
                ("", 0.0),
                (", a straggler", given.delay),
                (", a failing engine", FAILS),
            ):
                ways: dict[str, Callable[[], int]] = {
                    "bare": partial(bench.bare, delay),
                    "collected": partial(bench.collected, delay, pool),
                    "not graded": partial(bench.collected, delay, None),
                }
                if delay:
                    del ways["not graded"]
                steps = [partial(bench.timed, kind + what, way) for kind, way in ways.items()]
                seconds = dict(zip(ways, in_turns(steps, given.repeats), strict=True))
                tokens = float(np.median(list(bench.tokens)))
                for way, took in seconds.items():
                    speed, cores = (
                        float(tokens / np.median(took)),
                        float(np.median(bench.cores[way + what][1:])),
                    )
                    rows.append(
                        {"responses": way + what, "response tokens/s": speed, "s of rank 0": cores}
                    )
                figures.append(
                    ratio_figure(
                        f"seconds a token{what}, bare over collected",
                        seconds["bare"],
                        seconds["collected"],
                    )
                )
                if not delay:
                    graded = seconds["not graded"], seconds["collected"]
                    figures.append(ratio_figure("seconds a token, not graded over graded", *graded))
    title = (
        f"{given.prompts} x {given.group} responses of at most {given.longest} tokens, "
        f"{given.engines} engines"
    )
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()
