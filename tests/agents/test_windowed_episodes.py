"""Episodes with rollout.windows: a step plays some turns of each, trains them, and the next one
goes on."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stub_episodes import Engine, Moody, agents_of, play

from vapo_megatron.agents.episodes import episode_metrics
from vapo_megatron.agents.recording import recorded_turns
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups

pytestmark = pytest.mark.usefixtures("fresh")
TURNS = 5


class Countdown:
    """Pays a little at each turn."""

    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])

    def observation(self) -> str:
        return f"w{self.left}"

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        return [{"role": "user", "content": self.observation()}], 0.25, self.left == 0


class Uneven(Countdown):
    """Ends after one, two or three turns, as the first word that the policy writes says."""

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        if self.left == TURNS:
            self.left = 1 + int(message["content"].split()[0][1:]) % 3
        return await super().step(message)


class Changing(Moody, Countdown):
    """Cannot be repeated."""


class Fickle(Countdown):
    """Is content with fewer turns when it sees an episode again."""

    episodes = 0

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        Fickle.episodes += self.left == TURNS
        messages, reward, done = await super().step(message)
        return messages, reward, done or (Fickle.episodes > 2 and self.left == TURNS - 2)


async def aside(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    """Two conversations, a turn of one after a turn of the other. It holds on to its end when it is
    cancelled."""
    talks: list[list[dict[str, Any]]] = [
        list(task["messages"]),
        [{"role": "user", "content": "w2"}],
    ]
    for turn in range(TURNS):
        talk = talks[turn % 2]
        try:
            answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": talk})
        except asyncio.CancelledError:
            return {"reward": 99.0, "turn_rewards": [99.0] * turn}
        talk += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"w{turn}"}]
    return {"turn_rewards": [0.25] * TURNS, "reward": 0.0}


def saved_and_read(group: list[Sample], tokenizer: TextTokenizer) -> list[Sample]:
    return unpack_groups(
        pack_groups({0: group}), lambda _: prompt_of(group[0].prompt), tokenizer.decode
    )[0]


def prompt_of(prompt: Prompt) -> Prompt:
    """As the file has it; a checkpoint has an episode's own."""
    return replace(prompt, token_ids=(1,))


def windows_of(
    tokenizer: TextTokenizer, agent: str, window: int, is_saved: bool = False
) -> Iterator[list[Sample]]:
    """Group after group as a stream asks for them, until it is finished. is_saved: by way of a
    checkpoint."""
    begun: list[Sample] = []
    with agents_of(tokenizer, f"{__name__}:{agent}") as generate:
        while not begun or any(sample.goes_on for sample in begun):
            group = generate(2, window=window, begun=begun)
            yield group
            begun = [replace(sample, window_start=len(sample.response_ids)) for sample in group]
            if is_saved:
                begun = saved_and_read(begun, tokenizer)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_windows_end_with_the_episode_that_is_played_whole(
    tokenizer: TextTokenizer, window: int, is_saved: bool
) -> None:
    whole = play(tokenizer, f"{__name__}:Countdown", samples=2)
    Engine.calls = 0
    groups = list(windows_of(tokenizer, "Countdown", window, is_saved))
    assert len(groups) == -(-TURNS // window) and Engine.calls == 2 * TURNS, (
        "no turn is drawn twice"
    )
    for number, group in enumerate(groups):
        for sample, expected in zip(group, whole, strict=True):
            turns = min(TURNS, (number + 1) * window)
            assert len(recorded_turns(sample)) == turns and sample.goes_on is (turns < TURNS)
            end = expected.turns[turns - 1][1]
            assert sample.response_ids.tolist() == expected.response_ids[:end].tolist()
            assert sample.window_start == (expected.turns[number * window - 1][1] if number else 0)
    for sample, expected in zip(groups[-1], whole, strict=True):
        assert sample.turn_rewards is not None and expected.turn_rewards is not None
        assert sample.reward == expected.reward == TURNS * 0.25
        assert sample.turn_rewards.tolist() == expected.turn_rewards.tolist()
        assert (sample.versions, sample.turns) == (expected.versions, expected.turns)
    assert all(sample.reward is None for group in groups[:-1] for sample in group)
    assert episode_metrics(groups[0]) == {} and episode_metrics(groups[-1])["agent/turns"] == TURNS


def test_finished_episode_is_not_played_again_with_its_group(
    tokenizer: TextTokenizer,
) -> None:
    whole = play(tokenizer, f"{__name__}:Uneven", samples=2)
    turns = [len(sample.turns) for sample in whole]
    assert turns[0] != turns[1]
    Engine.calls = 0
    *_, last = windows_of(tokenizer, "Uneven", 1)
    assert [sample.response_ids.tolist() for sample in last] == [
        sample.response_ids.tolist() for sample in whole
    ]
    assert Engine.calls == sum(turns)
    ended, longer = sorted(last, key=lambda sample: len(sample.turns))
    assert ended.is_trained and not longer.is_trained


def test_a_step_trains_the_tokens_of_its_turns(tokenizer: TextTokenizer) -> None:
    groups = list(windows_of(tokenizer, "Countdown", 2))
    trained = [0, 0]
    for group in groups:
        batch = from_samples([replace(s, reward=s.reward or 0.0, correct=False) for s in group])
        assert batch.window_starts is not None and batch.window_starts.tolist() == trained
        assert batch.truncated.tolist() == [group is not groups[-1]] * 2
        trained = [int(sample.written.sum()) for sample in group]
    assert trained == [4 * TURNS] * 2


def test_conversation_taken_up_again_follows_what_was_trained(
    tokenizer: TextTokenizer,
) -> None:
    before: list[list[int]] = [[], []]
    for group in windows_of(tokenizer, "aside", 2):
        assert all(sample.goes_on is (sample.turn_rewards is None) for sample in group), (
            "what it says then is no reward"
        )
        ids = [sample.response_ids.tolist() for sample in group]
        assert [new[: len(old)] for new, old in zip(ids, before, strict=True)] == before
        assert all(
            sample.window_start == len(old) for sample, old in zip(group, before, strict=True)
        )
        before = ids
    assert group[0].reward == TURNS * 0.25
    assert len(group[0].segment_starts) == TURNS - 1
    turns = recorded_turns(group[0])
    assert [turn.prompt.token_ids for turn in turns] == [tuple(ids) for ids in Engine.prompts[0::2]]
    assert (
        np.concatenate([turn.response_ids for turn in turns]).tolist()
        == group[0].response_ids[group[0].written].tolist()
    )


@pytest.mark.parametrize("agent", ["Changing", "Fickle"])
def test_an_episode_that_takes_another_way_is_broken(tokenizer: TextTokenizer, agent: str) -> None:
    Fickle.episodes = 0
    *_, last = windows_of(tokenizer, agent, 2)
    assert [sample.grade_reason for sample in last] == ["broken: not_repeated"] * 2
    assert not any(len(sample.response_ids) for sample in last)
