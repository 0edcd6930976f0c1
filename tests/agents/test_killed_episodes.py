"""A stream of episodes that is killed at any turn goes on from its checkpoint as if nothing had
been."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vapo_megatron.agents.processes import open_agents
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.stream import GroupStream, Work
from vapo_megatron.weights.tiny import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '' if m['role'] == 'assistant' else '<bos> ' }}{{ m['content'] }} <eos> "
    "{% endfor %}"
)
PROMPTS = [Prompt(str(n), f"w{n}", "", (1, 10 + n, 2), cursor=n) for n in range(40)]
TURNS = 4
STEPS = 4


class StubClient:
    """Writes what follows from a request's seed; sees how many turns it wrote, and when to have the
    run killed."""

    turns = 0
    last_turn = 0
    killed: asyncio.Event

    def __init__(self, address: EngineAddress, timeout: float) -> None:
        self.address = address

    async def generate(
        self, prompts: list[list[int]], params: list[dict[str, Any]], *_: Any
    ) -> list[Completion]:
        StubClient.turns += 1
        if StubClient.turns >= StubClient.last_turn:
            await asyncio.sleep(60)  # never answers: the run is ended here
        await asyncio.sleep(params[0]["sampling_seed"] % 5 / 1000)
        ids = np.array([4 + params[0]["sampling_seed"] % 100, 2], np.int32)
        return [
            Completion(ids, -np.ones(2, np.float32), "stop", 0, 0, versions=((0, 2),))
            for _ in prompts
        ]

    async def abort(self, ids: list[str]) -> None: ...

    async def close(self) -> None: ...


class Countdown:
    """Pays a little at each turn."""

    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        return [{"role": "tool", "content": f"w{self.left}"}], 0.25, self.left == 0


def train(
    tokenizer: TextTokenizer, kills: list[int], windows: int = 1, processes: int = 0
) -> list[tuple[Any, ...]]:
    """All that is trained on, in order. kills: after how many turns of an attempt it dies."""
    trained: list[tuple[Any, ...]] = []
    saved: tuple[int, dict[str, Any], bytes] | None = None
    rule = StepRule(3, STEPS, staleness=2) if windows == 1 else StepRule(3, STEPS, windows=windows)
    window = None if windows == 1 else TURNS // windows
    episode = EpisodeConfig(max_tokens=99, processes=processes)
    config = RolloutConfig(agent=f"{__name__}:Countdown", episode=episode)
    while len(trained) < STEPS * 6:
        StubClient.turns = 0
        StubClient.last_turn = kills.pop(0) if kills else 10**9
        client: Any = StubClient
        with Dispatcher(
            [EngineAddress("http://stub", "")], config, [2], client=client
        ) as dispatcher:
            agents = open_agents(dispatcher, tokenizer, config)
            prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
            ledger = Ledger(rule, 0 if saved is None else saved[0], len(trained) // 6)

            def request(prompt: Prompt) -> GroupRequest:
                return GroupRequest(
                    prompt, 2, SamplingConfig(max_new_tokens=9), 9, 1, 0, window=window
                )

            timeout = 20.0 if StubClient.last_turn == 10**9 else 1.0
            work = Work(
                request, lambda group: None, lambda group: True, 6, timeout, agents.generate
            )
            stream = GroupStream(dispatcher, prompts, ledger, work)
            if saved is not None:
                stream.restore(saved[1], unpack_groups(saved[2], prompts.at, tokenizer.decode))
            try:
                while len(trained) < STEPS * 6:
                    groups = stream.take(lambda _: None)
                    trained += [facts(sample) for group in groups for sample in group]
                    stream.advance()
                    state, waiting = stream.state()
                    saved = (
                        stream.ledger.first,
                        json.loads(json.dumps(state)),
                        pack_groups(waiting),
                    )
            except Exception as error:
                assert "collect_timeout_s" in str(error)  # what was in flight is lost
            stream.close()
            agents.close()
    return trained


def facts(sample: Any) -> tuple[Any, ...]:
    rewards = None if sample.turn_rewards is None else sample.turn_rewards.tolist()
    ids = sample.response_ids.tolist()
    mask = sample.written.tolist()
    return (
        sample.prompt.cursor,
        sample.index,
        ids,
        mask,
        sample.window_start,
        rewards,
        sample.reward,
    )


def test_no_episode_is_lost_or_counted_twice(tmp_path: Path) -> None:
    word_tokenizer([f"w{n}" for n in range(120)], 256, TEMPLATE).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
    straight = train(tokenizer, [])
    assert [row[0] for row in straight] == [n // 2 for n in range(STEPS * 6)] and straight[0][
        -1
    ] == TURNS * 0.25
    assert set(Counter(row[:2] for row in straight).values()) == {1}
    assert train(tokenizer, [3, 30, 41]) == straight, (
        "killed in a first turn, a later one, and while others wait"
    )


def test_no_turn_is_lost_or_trained_twice_over_several_steps(
    tmp_path: Path,
) -> None:
    word_tokenizer([f"w{n}" for n in range(120)], 256, TEMPLATE).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
    straight = train(tokenizer, [], windows=2)
    assert [row[0] for row in straight] == [
        first + n // 2 for first in (0, 0, 3, 3) for n in range(6)
    ]
    assert [row[4] for row in straight[:12]] == [0] * 6 + [len(row[2]) for row in straight[:6]]
    assert train(tokenizer, [3, 20, 15], windows=2) == straight, (
        "killed in first windows, and between two of one"
    )


@pytest.mark.full
@pytest.mark.parametrize("windows", [1, 2])
def test_a_resumed_run_may_play_in_other_processes(tmp_path: Path, windows: int) -> None:
    word_tokenizer([f"w{n}" for n in range(120)], 256, TEMPLATE).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, PromptTemplate(chat_template=True))
    straight = train(tokenizer, [], windows)
    assert train(tokenizer, [30], windows, processes=2) == straight
