"""What a crowd of agents costs rank 0: episodes at once, with tools that take their time, on stub
engines.

    python -m benchmarks.agents_load [--episodes 1000] [--turns 8] [--slots 512] [--response-s 2.0]
    [--written 64] [--observed 1] [--template NAME] [--render-whole] [--json FILE]

The stub engines have so many slots in all; each holds a response for --response-s, which costs no
processor, and takes the next one of the engine's own queue then, as an engine in a process of its
own does. A tool takes 50 to 500 ms. Agents, endpoint and stubs share this process, as agents and
endpoint do in a run. Columns:

    added ms              what a request took beyond its time at the engines, on average: HTTP, the
    template, rank 0 loop ms, agents ms    CPU time of a request in the endpoint's thread (the
                          stub's is in it), and in the agents' thread (their HTTP client)
    all ms                the same of all threads, those included that render long requests
    idle                  share of the slots' seconds without a response; unavoidable: where rank 0
    takes no time
    whole                 requests of an episode whose history the chat template wrote again

A turn has --written tokens and a tool's answer of --observed words; the template is the plainest,
or one of benchmarks/chat_templates.py. --render-whole measures what it costs to write the whole
history at every request.
"""

import asyncio
import heapq
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.agents_rendering import WholeRenderer
from benchmarks.chat_templates import CHAT_TEMPLATES
from benchmarks.common import parser, publish
from vapo_megatron.agents.episodes import Agents, episode_metrics
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.weights.tiny import word_tokenizer

WORDS, WRITTEN, GROUP = [f"w{n}" for n in range(200)], 64, 8
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '' if m['role'] == 'assistant' else '<bos> ' }}{{ m['content'] }} <eos> "
    "{% endfor %}"
)
_FASTEST_TOOL, _SLOWEST_TOOL = 0.05, 0.5


class Load:
    """What agents and stubs see of the load, and measure."""

    turns, response_s, at_engines = 8, 2.0, 0.0
    written, observed = WRITTEN, 1
    free: list[float]  # when each slot has written what it was given
    took: list[float]
    agents_cpu = 0.0


class StubClient:
    """Answers after a while, without work."""

    def __init__(self, address: EngineAddress, timeout: float) -> None:
        self.address = address

    async def generate(self, prompts: list[list[int]], *_: Any) -> list[Completion]:
        """Responses of as many tokens."""
        start = time.monotonic()
        end = max(start, heapq.heappop(Load.free)) + Load.response_s
        heapq.heappush(Load.free, end)
        await asyncio.sleep(end - start)
        Load.at_engines += end - start
        ids = 4 + np.arange(Load.written, dtype=np.int32) % len(WORDS)
        ids[-1] = 2  # the end token
        logprobs = -np.ones(Load.written, np.float32)
        return [
            Completion(ids, logprobs, "stop", 0, 0, versions=((0, Load.written),)) for _ in prompts
        ]

    async def close(self) -> None:
        """Nothing is open."""


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """An agent that calls a tool between its turns."""
    messages, chance = list(task["messages"]), random.Random(base_url)
    for turn in range(Load.turns):
        start = time.monotonic()
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        Load.took.append(time.monotonic() - start)
        answer.raise_for_status()
        messages += [
            answer.json()["choices"][0]["message"],
            {"role": "tool", "content": " ".join([f"w{turn}"] * Load.observed)},
        ]
        await asyncio.sleep(chance.uniform(_FASTEST_TOOL, _SLOWEST_TOOL))
        Load.agents_cpu = time.thread_time()
    return 1.0


def unavoidable(episodes: int, slots: int) -> float:
    """Idle share of the slots where rank 0 takes no time: episodes in a queue for slots, tools
    between turns."""
    chance, free = random.Random(0), [0.0] * slots
    ready = [(0.0, number, 0) for number in range(episodes)]
    end = 0.0
    while ready:
        at, number, turn = heapq.heappop(ready)
        done = max(at, heapq.heappop(free)) + Load.response_s
        heapq.heappush(free, done)
        end = max(end, done)
        if turn + 1 < Load.turns:
            heapq.heappush(
                ready, (done + chance.uniform(_FASTEST_TOOL, _SLOWEST_TOOL), number, turn + 1)
            )
    return 1 - episodes * Load.turns * Load.response_s / (slots * end)


async def _thread_seconds() -> float:
    return time.thread_time()


def main() -> None:
    """One row."""
    arguments = parser(__doc__)
    arguments.add_argument("--episodes", type=int, default=1000)
    arguments.add_argument("--turns", type=int, default=8)
    arguments.add_argument(
        "--slots", type=int, default=512, help="responses that the engines write at once"
    )
    arguments.add_argument("--response-s", type=float, default=2.0, help="seconds of a response")
    arguments.add_argument("--written", type=int, default=WRITTEN, help="tokens of a response")
    arguments.add_argument("--observed", type=int, default=1, help="words of a tool's answer")
    arguments.add_argument("--template", choices=CHAT_TEMPLATES, help="default: the plainest")
    arguments.add_argument("--render-whole", action="store_true")
    given = arguments.parse_args()
    from benchmarks.agents_load import (  # of the module that the agent is imported from
        Load,
        StubClient,
    )

    Load.turns, Load.response_s, Load.took = given.turns, given.response_s, []
    Load.free = [0.0] * given.slots
    Load.written, Load.observed = given.written, given.observed
    template = CHAT_TEMPLATES.get(given.template, TEMPLATE)
    config = RolloutConfig(
        agent="benchmarks.agents_load:run",
        episode=EpisodeConfig(max_turns=given.turns, max_tokens=65536),
        max_running_requests=given.slots,
    )
    with TemporaryDirectory() as folder:
        word_tokenizer(WORDS, 65536, template).save_pretrained(folder)
        tokenizer = TextTokenizer(Path(folder), PromptTemplate(chat_template=True))
    stub: Any = StubClient
    with Dispatcher([EngineAddress("http://stub", "")], config, [2], client=stub) as dispatcher:
        agents = Agents(dispatcher, tokenizer, config)
        if given.render_whole:
            agents._endpoint._renderer = WholeRenderer(tokenizer)
        sampling = SamplingConfig(max_new_tokens=given.written)
        prompts = [
            Prompt(str(n), "w1 w2", "", (1, 5, 6, 2), cursor=n)
            for n in range(-(-given.episodes // GROUP))
        ]

        async def play() -> list[Sample]:
            groups = [
                GroupRequest(prompt, GROUP, sampling, given.written, 0, 0) for prompt in prompts
            ]
            played = await asyncio.gather(*map(agents.generate, groups))
            return [episode for group in played for episode in group]

        before, start = dispatcher.loop.run(_thread_seconds()), time.monotonic()
        process = time.process_time()
        episodes = dispatcher.loop.run(play())
        wall, loop_cpu = time.monotonic() - start, dispatcher.loop.run(_thread_seconds()) - before
        process = time.process_time() - process
        broken = agents.broken.total()
        agents.close()
    requests = len(Load.took)
    row = {
        "episodes": len(episodes),
        "broken": broken,
        "requests": requests,
        "seconds": wall,
        "added ms": (sum(Load.took) - Load.at_engines) / requests * 1e3,
        "loop ms": loop_cpu / requests * 1e3,
        "agents ms": Load.agents_cpu / requests * 1e3,
        "all ms": process / requests * 1e3,
        "idle": 1 - requests * given.response_s / (given.slots * wall),
        "whole": episode_metrics(episodes).get("agent/rendered_whole", 0.0),
        "unavoidable": unavoidable(len(episodes), given.slots),
    }
    publish(
        f"{given.turns} turns, {given.slots} slots, {given.response_s:g} s a response",
        [row],
        given.json,
    )


if __name__ == "__main__":
    main()
