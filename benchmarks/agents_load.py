"""What a crowd of agents costs rank 0: episodes at once, with tools that take their time, on stub
engines.

    python -m benchmarks.agents_load [--episodes 1000] [--turns 8] [--slots 512] [--response-s 2.0]
    [--written 64] [--observed 1] [--template NAME] [--render-whole] [--json FILE]
    python -m benchmarks.agents_load --processes 0 2 [--agent-ms 0 5] [--repeats 5] [...]

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

--processes compares values of rollout.episode.processes instead, each with agents that spend
--agent-ms of processor time on every turn. The values take turns, round by round. The stub engine
is then a process of its own, which is in none of these columns:

    turns/s               turns of all episodes over the seconds that the round took
    rank 0 s              CPU seconds of this process per 1,000 turns: dispatcher, HTTP to the
                          engine and, with 0 processes, endpoint and agents
    processes' s          CPU seconds of all processes that play episodes, per 1,000 turns
"""

import argparse
import asyncio
import heapq
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.agents_rendering import WholeRenderer
from benchmarks.chat_templates import CHAT_TEMPLATES
from benchmarks.common import Figure, in_turns, parser, publish, ratio_figure
from benchmarks.slot_engine import slot_engine
from vapo_megatron.agents.episodes import Agents, episode_metrics
from vapo_megatron.agents.processes import AgentProcesses, open_agents
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
    """What the stubs of this process see of the load, and what agents and stubs measure."""

    response_s, at_engines = 2.0, 0.0
    written = WRITTEN
    free: list[float]  # when each slot has written what it was given
    took: ClassVar[list[float]] = []
    agents_cpu = 0.0


def response_tokens(written: int) -> NDArray[np.int32]:
    """Token ids of a stub's response."""
    ids = 4 + np.arange(written, dtype=np.int32) % len(WORDS)
    ids[-1] = 2  # the end token
    return ids


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
        ids = response_tokens(Load.written)
        logprobs = -np.ones(Load.written, np.float32)
        return [
            Completion(ids, logprobs, "stop", 0, 0, versions=((0, Load.written),)) for _ in prompts
        ]

    async def close(self) -> None:
        """Nothing is open."""


def spend(seconds: float) -> None:
    """Use so much processor time of this thread, in Python."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def run(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """An agent that calls a tool between its turns. Its row says what it does: it may play in
    another process."""
    messages, chance = list(task["messages"]), random.Random(base_url)
    for turn in range(task["turns"]):
        start = time.monotonic()
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        Load.took.append(time.monotonic() - start)
        answer.raise_for_status()
        spend(task["agent_ms"] / 1e3)
        messages += [
            answer.json()["choices"][0]["message"],
            {"role": "tool", "content": " ".join([f"w{turn}"] * task["observed"])},
        ]
        await asyncio.sleep(chance.uniform(_FASTEST_TOOL, _SLOWEST_TOOL))
        Load.agents_cpu = time.thread_time()
    return 1.0


def unavoidable(episodes: int, turns: int, slots: int, response_s: float) -> float:
    """Idle share of the slots where rank 0 takes no time: episodes in a queue for slots, tools
    between turns."""
    chance, free = random.Random(0), [0.0] * slots
    ready = [(0.0, number, 0) for number in range(episodes)]
    end = 0.0
    while ready:
        at, number, turn = heapq.heappop(ready)
        done = max(at, heapq.heappop(free)) + response_s
        heapq.heappush(free, done)
        end = max(end, done)
        if turn + 1 < turns:
            heapq.heappush(
                ready, (done + chance.uniform(_FASTEST_TOOL, _SLOWEST_TOOL), number, turn + 1)
            )
    return 1 - episodes * turns * response_s / (slots * end)


async def _thread_seconds() -> float:
    return time.thread_time()


def config_of(given: argparse.Namespace, processes: int = 0) -> RolloutConfig:
    """Section rollout of the load."""
    episode = EpisodeConfig(max_turns=given.turns, max_tokens=65536, processes=processes)
    return RolloutConfig(
        agent="benchmarks.agents_load:run", episode=episode, max_running_requests=given.slots
    )


def requests_of(given: argparse.Namespace, agent_ms: float = 0.0) -> list[GroupRequest]:
    """All episodes, in groups. agent_ms: processor time of the agent's own code in each turn."""
    sampling = SamplingConfig(max_new_tokens=given.written)
    row = {"turns": given.turns, "observed": given.observed, "agent_ms": agent_ms}
    prompts = [
        Prompt(str(n), "w1 w2", "", (1, 5, 6, 2), cursor=n, extra=row)
        for n in range(-(-given.episodes // GROUP))
    ]
    return [GroupRequest(prompt, GROUP, sampling, given.written, 0, 0) for prompt in prompts]


async def play(agents: Agents | AgentProcesses, groups: Sequence[GroupRequest]) -> list[Sample]:
    """All episodes at once."""
    played = await asyncio.gather(*map(agents.generate, groups))
    return [episode for group in played for episode in group]


def measure_load(given: argparse.Namespace, tokenizer: TextTokenizer) -> None:
    """Print one row: agents, endpoint and stub engines in this process."""
    from benchmarks.agents_load import (  # of the module that the agent is imported from
        Load,
        StubClient,
    )

    Load.response_s, Load.at_engines, Load.agents_cpu = given.response_s, 0.0, 0.0
    Load.free, Load.written = [0.0] * given.slots, given.written
    Load.took.clear()
    config = config_of(given)
    stub: Any = StubClient
    with Dispatcher([EngineAddress("http://stub", "")], config, [2], client=stub) as dispatcher:
        agents = Agents(dispatcher, tokenizer, config)
        if given.render_whole:
            agents._endpoint._renderer = WholeRenderer(tokenizer)
        groups = requests_of(given)
        before, start = dispatcher.loop.run(_thread_seconds()), time.monotonic()
        process = time.process_time()
        episodes = dispatcher.loop.run(play(agents, groups))
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
        "unavoidable": unavoidable(len(episodes), given.turns, given.slots, given.response_s),
    }
    publish(title_of(given), [row], given.json)


@dataclass(frozen=True)
class Round:
    """Seconds of a turn in one round of episodes: by the clock, of this process's processors, and
    of those of the processes that play."""

    wall: float
    rank_0: float
    players: float


def play_round(
    dispatcher: Dispatcher,
    agents: Agents | AgentProcesses,
    players: Sequence[psutil.Process],
    groups: Sequence[GroupRequest],
) -> Round:
    """Play all episodes once. players: the processes that may play them."""

    def spent() -> float:
        times = [player.cpu_times() for player in players]
        return sum(time.user + time.system for time in times)

    before, cpu, start = spent(), time.process_time(), time.monotonic()
    episodes = dispatcher.loop.run(play(agents, groups))
    wall, cpu = time.monotonic() - start, time.process_time() - cpu
    if agents.broken:
        raise SystemExit(f"episodes broke: {dict(agents.broken)}")
    turns = sum(len(episode.turns) for episode in episodes)
    return Round(wall / turns, cpu / turns, (spent() - before) / turns)


def play_rounds(
    given: argparse.Namespace, tokenizer: TextTokenizer
) -> dict[tuple[float, int], list[Round]]:
    """The rounds that count, by an agent's milliseconds and number of processes."""
    rounds: dict[tuple[float, int], list[Round]] = {
        (agent_ms, count): [] for agent_ms in given.agent_ms for count in given.processes
    }
    with ExitStack() as stack:
        ids = response_tokens(given.written)
        address = stack.enter_context(slot_engine(given.slots, given.response_s, ids))
        dispatcher = stack.enter_context(Dispatcher([address], config_of(given), [2]))
        others = set(psutil.Process().children())
        agents = {}
        for count in given.processes:
            agents[count] = open_agents(dispatcher, tokenizer, config_of(given, count))
            stack.callback(agents[count].close)
        players = list(set(psutil.Process().children()) - others)

        def step(agent_ms: float, count: int) -> None:
            groups = requests_of(given, agent_ms)
            played = play_round(dispatcher, agents[count], players, groups)
            rounds[agent_ms, count].append(played)

        in_turns([partial(step, *key) for key in rounds], given.repeats)
    return {key: played[1:] for key, played in rounds.items()}


def compare_processes(given: argparse.Namespace, tokenizer: TextTokenizer) -> None:
    """Print a row for each agent and number of processes, and the ratios to the first number."""
    rounds = play_rounds(given, tokenizer)
    rows = []
    figures: list[Figure] = []
    for (agent_ms, count), played in rounds.items():
        rows.append(
            {
                "agent ms": agent_ms,
                "processes": count,
                "turns/s": float(np.median([1 / turn.wall for turn in played])),
                "rank 0 s": 1e3 * float(np.median([turn.rank_0 for turn in played])),
                "processes' s": 1e3 * float(np.median([turn.players for turn in played])),
            }
        )
        first = given.processes[0]
        if count == first:
            continue
        base = rounds[agent_ms, first]
        agent = f"an agent of {agent_ms:g} ms a turn"
        figures += [
            ratio_figure(
                f"{agent}: rank 0's seconds, {first} processes over {count}",
                [turn.rank_0 for turn in base],
                [turn.rank_0 for turn in played],
            ),
            ratio_figure(
                f"{agent}: turns/s, {count} processes over {first}",
                [turn.wall for turn in base],
                [turn.wall for turn in played],
            ),
        ]
    publish(f"{given.episodes} episodes of {title_of(given)}", rows, given.json, figures)


def title_of(given: argparse.Namespace) -> str:
    """The load in words."""
    return f"{given.turns} turns, {given.slots} slots, {given.response_s:g} s a response"


def main() -> None:
    """One row of the load, or the comparison of numbers of processes."""
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
    arguments.add_argument(
        "--processes", type=int, nargs="+", help="values of rollout.episode.processes to compare"
    )
    arguments.add_argument(
        "--agent-ms",
        type=float,
        nargs="+",
        default=[0.0, 5.0],
        help="with --processes: processor time of the agent's own code in each turn",
    )
    arguments.add_argument("--repeats", type=int, default=5, help="with --processes: rounds")
    given = arguments.parse_args()
    if given.processes and given.render_whole:
        arguments.error("--render-whole is measured without --processes")
    with TemporaryDirectory() as folder:
        template = CHAT_TEMPLATES.get(given.template, TEMPLATE)
        word_tokenizer(WORDS, 65536, template).save_pretrained(folder)
        tokenizer = TextTokenizer(Path(folder), PromptTemplate(chat_template=True))
    if given.processes:
        compare_processes(given, tokenizer)
    else:
        measure_load(given, tokenizer)


if __name__ == "__main__":
    main()
