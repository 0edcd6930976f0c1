"""A collection with its grading against the bare engine, in one run.

    python -m benchmarks.collection [--prompts 32] [--group 8] [--engines 2] [--json FILE]

A random model (0.85 M parameters) on real engines of this machine. "bare" sends the same requests, as many at once, and
reads nothing of the answers but their length; "collected" is what a step does: groups drawn by the ledger, spread over
the engines, decoded and graded by verifier processes while others are generated, put in order. With "a straggler" one
engine answers each group --delay seconds late, on both sides. With "a failing engine" one of them refuses its first
request and gets nothing more: its groups go to the others, beside which "bare" has the others alone from the start. The
sides take turns.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import in_turns, parser, publish, ratio_figure
from benchmarks.step_beside_trl import make_inputs
from vapo_megatron.config.data import DataConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.experience.prompts import PromptSource, train_prompts
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.client import Completion, EngineClient
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.server import EngineServer
from vapo_megatron.rollout.stream import GroupStream, Work

EOS = 2
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
    """Both ways to get the responses to the next prompts, and how many tokens each got."""

    def __init__(self, servers: list[EngineServer], given: argparse.Namespace, folder: Path) -> None:
        self.given, self.config = given, RolloutConfig(num_engines=given.engines, context_length=512)
        self.addresses = [server.address for server in servers]
        self.sampling = SamplingConfig(max_new_tokens=given.longest)
        data = DataConfig(train=folder / "train.jsonl", max_prompt_tokens=given.prompt)
        self.tokenizer = TextTokenizer(folder / "model", data.prompt)
        self.prompts = PromptSource(train_prompts(data, self.tokenizer), 1, True)
        self.tokens: dict[str, list[int]] = {}

    def bare(self, delay: float) -> None:
        """As many groups at once as the dispatcher has in flight: all."""
        prompts = self.prompts.take(self.given.prompts)

        async def run() -> int:
            clients = [Late(address, 600) for address in self.addresses[int(delay == FAILS) :]]
            clients[0].delay = 0.0 if delay == FAILS else delay
            params = {"temperature": 1.0, "max_new_tokens": self.given.longest, "stop_token_ids": [EOS]}

            async def group(number: int, prompt: Prompt) -> int:
                seeded = [params | {"sampling_seed": prompt.cursor * 1000 + i} for i in range(self.given.group)]
                found = await clients[number % len(clients)].generate([prompt.token_ids] * self.given.group, seeded)
                return sum(len(one.token_ids) for one in found)

            counts = await asyncio.gather(*(group(*pair) for pair in enumerate(prompts)))
            for client in clients:
                await client.close()
            return sum(counts)

        self.tokens.setdefault(f"bare{delay}", []).append(asyncio.run(run()))

    def collected(self, delay: float, pool: VerifierPool) -> None:
        """A step's collection."""

        def request(prompt: Prompt) -> GroupRequest:
            return GroupRequest(prompt, self.given.group, self.sampling, self.given.longest, 1, 0)

        def grade(group: list[Sample]) -> None:
            grade_samples(group, pool, self.tokenizer.decode, RewardConfig())

        rule = StepRule(self.given.prompts, 1)
        work = Work(request, grade, lambda group: True, self.given.prompts * self.given.group, 600)
        with Dispatcher(self.addresses, self.config, [EOS]) as dispatcher:
            first = dispatcher._engines[0]
            first.client = Late(self.addresses[0], 600)
            first.client.delay = delay
            stream = GroupStream(dispatcher, self.prompts, Ledger(rule, self.prompts.cursor, 0), work)
            groups = stream.take(lambda responses: None)
            self.prompts.cursor = stream.ledger.first
            stream.close()
        counts = sum(len(sample.response_ids) for group in groups for sample in group)
        self.tokens.setdefault(f"collected{delay}", []).append(counts)


def main() -> None:
    """A row for each way."""
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    arguments.add_argument("--group", type=int, default=8)
    arguments.add_argument("--longest", type=int, default=128)
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--delay", type=float, default=0.5)
    arguments.add_argument("--repeats", type=int, default=7)
    given = arguments.parse_args()
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as name, VerifierPool(RewardConfig(workers=1)) as pool:
        folder = Path(name)
        make_inputs(folder, 4 * given.prompts, given.prompt)
        config = RolloutConfig(num_engines=given.engines, context_length=512)
        servers = [
            EngineServer(folder / "model", config, "float32", folder / f"engine{number}.log")
            for number in range(given.engines)
        ]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_ready()
            bench = Bench(servers, given, folder)
            for what, delay in (("", 0.0), (", a straggler", given.delay), (", a failing engine", FAILS)):
                steps = [lambda d=delay: bench.bare(d), lambda d=delay: bench.collected(d, pool)]
                seconds = in_turns(steps, given.repeats)
                per_token = []
                for way, took in zip(("bare", "collected"), seconds, strict=True):
                    tokens = bench.tokens[f"{way}{delay}"][1:]
                    per_token.append([s / n for s, n in zip(took, tokens, strict=True)])
                    rows.append({"responses": way + what, "response tokens/s": float(1 / np.median(per_token[-1]))})
                figures.append(ratio_figure(f"seconds a token{what}, bare over collected", *per_token))
        finally:
            for server in servers:
                server.stop()
    title = f"{given.prompts} x {given.group} responses of at most {given.longest} tokens, {given.engines} engines"
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()
