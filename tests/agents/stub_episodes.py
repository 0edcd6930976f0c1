"""Agents on engines that answer at once, or as a script says."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vapo_megatron.agents.processes import open_agents
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.errors import TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.weights.routed_experts import ExpertChoices
from vapo_megatron.weights.tiny import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '' if m['role'] == 'assistant' else '<bos> ' }}{{ m['content'] }} <eos> "
    "{% endfor %}"
)
WRITTEN = 4


class Engine:
    """Writes four tokens that follow from the seed, or those of the script; the first call may
    hang, and a later one may find it gone. Text before "add" is text, after each "add" are the
    arguments of a call. A token's experts are its number and that of the call."""

    hangs = False
    gone_at = 0
    calls = 0
    aborted = 0
    seconds = 0.0
    script: ClassVar[list[list[int]]] = []
    prompts: ClassVar[list[list[int]]] = []
    urls: ClassVar[list[str]] = []

    def __init__(self, address: EngineAddress, timeout: float) -> None:
        self.address = address

    async def generate(
        self,
        prompts: list[list[int]],
        params: list[dict[str, Any]],
        experts: ExpertChoices | None = None,
        *_: Any,
    ) -> list[Completion]:
        completions = await self.completions(prompts, params)
        call = Engine.calls
        for prompt, completion in zip(prompts, completions, strict=True):
            if experts is not None:
                read = [*prompt, *completion.token_ids.tolist()][experts.start : -1]
                completion.routed_experts = torch.tensor(
                    [[token, call] for token in read], dtype=torch.uint8
                )
        return completions

    async def completions(
        self, prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> list[Completion]:
        Engine.calls += 1
        if Engine.hangs and Engine.calls == 1:
            await asyncio.sleep(60)
        if Engine.calls == Engine.gone_at:
            raise TryAgain("the server is gone")
        await asyncio.sleep(Engine.seconds)
        Engine.prompts += prompts
        Engine.urls += [self.address.url]
        if Engine.script:
            ids = np.array(Engine.script.pop(0), np.int32)
            end = "stop" if ids[-1] == 2 else "length"
            return [
                Completion(
                    ids, -np.ones(len(ids), np.float32), end, 0, 0, versions=((0, len(ids)),)
                )
            ]
        count = min(WRITTEN, params[0]["max_new_tokens"])
        drawn = [4 + (params[0]["sampling_seed"] >> place) % 90 for place in range(WRITTEN - 1)]
        ids = np.array([*drawn, 2][:count], np.int32)
        end = "stop" if count == WRITTEN else "length"
        return [
            Completion(ids, -np.ones(count, np.float32), end, 0, 0, versions=((0, count),))
            for _ in prompts
        ]

    async def abort(self, ids: list[str]) -> None:
        Engine.aborted += len(ids)

    async def parse_tool_calls(
        self, text: str, tools: Any, parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        before, *calls = text.split("add ")
        return before, [
            {"name": "add", "parameters": json.dumps({"a": arguments.strip()})}
            for arguments in calls
        ]

    async def close(self) -> None: ...


class Moody:
    """Of an environment: what it says at a turn, which is something else in every episode."""

    said = 10

    def observation(self) -> str:
        Moody.said += 1
        return f"w{Moody.said % 90}"


def fresh_engine() -> None:
    """Make the engines as they are without a test's wishes."""
    Engine.hangs = False
    Engine.gone_at = 0
    Engine.calls = 0
    Engine.aborted = 0
    Engine.seconds = 0.0
    Engine.script = []
    Engine.prompts = []
    Engine.urls = []


def make_tokenizer(folder: Path, template: str, words: Sequence[str] = ()) -> TextTokenizer:
    """A tokenizer of words, w0 to w99 among them from id 4 on, with this chat template."""
    word_tokenizer([*(f"w{n}" for n in range(100)), *words], 256, template).save_pretrained(folder)
    return TextTokenizer(folder, PromptTemplate(chat_template=True))


@contextmanager
def agents_of(
    tokenizer: TextTokenizer,
    agent: str,
    engines: int = 1,
    experts: ExpertChoices | None = None,
    **settings: Any,
) -> Iterator[Callable[..., list[Sample]]]:
    """Plays groups of episodes: called with their number of episodes, and further fields of the
    request. settings: limits, and others of rollout."""
    limits = {
        name: settings.pop(name) for name in list(settings) if name in EpisodeConfig.model_fields
    }
    config = RolloutConfig(
        agent=agent, episode=EpisodeConfig(**{"max_tokens": 200} | limits), **settings
    )
    stub: Any = Engine
    prompt = Prompt("row", "w3 w4", "w9", tuple(tokenizer.encode_prompt("w3 w4")), cursor=7)
    addresses = [EngineAddress(f"http://stub{number}", "") for number in range(engines)]
    with Dispatcher(addresses, config, [tokenizer.eos_id], client=stub) as dispatcher:
        agents = open_agents(dispatcher, tokenizer, config)
        sampling = SamplingConfig(max_new_tokens=12)
        try:
            yield lambda samples, **fields: dispatcher.loop.run(
                agents.generate(
                    GroupRequest(prompt, samples, sampling, 12, 11, 0, experts, **fields)
                )
            )
        finally:
            agents.close()


def play(tokenizer: TextTokenizer, agent: str, samples: int = 3, **settings: Any) -> list[Sample]:
    """One group of episodes."""
    with agents_of(tokenizer, agent, **settings) as group:
        return group(samples)
