"""Agents as they are given: a function in the working directory, an environment of verifiers, and
what they return."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from stub_episodes import TEMPLATE, WRITTEN, make_tokenizer, play

from vapo_megatron.agents.agent import check_agent, load_agent
from vapo_megatron.agents.episodes import task_of
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent_of_a_user.py").write_text(
        "async def play(task, base_url, http_client):\n    return 1.0\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        agent = load_agent("agent_of_a_user:play")
    assert asyncio.run(agent({}, "", None)) == 1.0 and sys.path.count(str(tmp_path)) == 1  # type: ignore[arg-type]
    del sys.modules["agent_of_a_user"]


def test_missing_agent_is_refused_with_how_one_is_named() -> None:
    with pytest.raises(
        BadInput,
        match=r"^rollout\.agent=nowhere:f: cannot be imported .*: give package\.module:name, ",
    ):
        load_agent("nowhere:f")


def test_task_is_the_row_with_the_messages_of_an_agentless_run(
    tokenizer: TextTokenizer,
) -> None:
    prompt = Prompt(
        "row", "w3 w4", "w7", (1, 2), cursor=7, extra={"level": 2, "answer": "of the row"}
    )
    messages = [{"role": "user", "content": "w3 w4"}]
    expected = {"level": 2, "id": "row", "problem": "w3 w4", "answer": "w7", "messages": messages}
    assert task_of(prompt, tokenizer) == expected


class WithTools:
    """An environment that sends tools with every request."""

    tools: ClassVar[list[dict[str, Any]]] = [{"type": "function", "function": {"name": "add"}}]

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], 0.0, True


def test_tools_need_a_template_that_shows_them(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    shows = make_tokenizer(
        tmp_path, "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + TEMPLATE
    )
    without = f"{__name__}:returns"
    sends = f"{__name__}:WithTools"
    parsed = EpisodeConfig(tool_parser="words")
    for config, key in (
        (RolloutConfig(agent=sends), f"rollout.agent={sends} sends tools"),
        (RolloutConfig(agent=sends, episode=parsed), f"rollout.agent={sends} sends tools"),
        (RolloutConfig(agent=without, episode=parsed), "rollout.episode.tool_parser=words"),
    ):
        with pytest.raises(BadInput) as refused:
            check_agent(config, tokenizer)
        assert str(refused.value).startswith(
            f"{key}, and the chat template of {tokenizer.directory} ignores tools"
        )
        check_agent(config, shows)
    for config in (RolloutConfig(), RolloutConfig(agent=without)):
        check_agent(config, tokenizer)


class Sums:
    """An environment as the library verifiers has them; it notes what it is given, and earns a
    quarter."""

    def __init__(self) -> None:
        self.rubric = self
        self.given = SimpleNamespace()
        self.error = None

    async def rollout(
        self, row: dict[str, Any], client: Any, model: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        self.given = SimpleNamespace(row=row, client=client, model=model, sampling=sampling)
        return {"error": self.error}

    async def score_rollout(self, state: dict[str, Any], score_sem: Any) -> None:
        async with score_sem:
            state["reward"] = "0.25"


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sums]:
    environment = Sums()
    library = SimpleNamespace(load_environment={"sums": environment}.__getitem__)
    monkeypatch.setitem(sys.modules, "verifiers", library)  # type: ignore[arg-type]
    yield environment


TASK = {"id": "row", "messages": [{"role": "user", "content": "w3 w4"}], "answer": "w7"}


def run(task: dict[str, Any]) -> Any:
    async def with_client() -> Any:
        async with httpx.AsyncClient() as client:
            return await load_agent("verifiers:sums")(task, "http://127.0.0.1:1/v1", client)

    return asyncio.run(with_client())


def test_verifiers_environment_gets_the_row_and_our_endpoint(sums: Sums) -> None:
    assert run(TASK) == {"reward": 0.25}
    row = {"prompt": TASK["messages"], "answer": "w7", "example_id": 0, "task": "sums", "info": {}}
    assert sums.given.row == row and sums.given.sampling == {}, "the run's own sampling"
    client = sums.given.client
    assert str(client.base_url) == "http://127.0.0.1:1/v1/" and client.max_retries == 0
    own = {"prompt": [{"role": "user", "content": "w9"}], "task": "legs", "info": {"level": 2}}
    run(TASK | own)
    assert sums.given.row == row | own


def test_an_error_of_verifiers_is_named_with_its_cause(sums: Sums) -> None:
    sums.error = RuntimeError("of the library")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"^sums: .*of the library"):
        run(TASK)
    sums.error.__cause__ = KeyError("of the user's")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"^sums: KeyError.*of the user's"):
        run(TASK)


answer: Any = None


async def returns(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    messages = list(task["messages"])
    for _ in range(2):
        reply = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        messages += [reply.json()["choices"][0]["message"], {"role": "tool", "content": "w8"}]
    return answer


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (float("nan"), "reward=nan, expected a finite number"),
        ("0.5", "reward='0.5', expected a finite number"),
        ({"reward": True}, "reward=True, expected a finite number"),
        ({"turn_rewards": [1.0]}, "turn_rewards=[1.0], expected 2 finite numbers, one a turn"),
        (
            {"turn_rewards": [1.0, None]},
            "turn_rewards=[1.0, None], expected 2 finite numbers, one a turn",
        ),
        (
            {"tool_errors": [1]},
            "tool_errors=[1], expected a finite number, or 2 finite numbers, one a turn",
        ),
        ({"reward": 1.0, "correct": 1}, "correct=1, expected true or false"),
    ],
)
def test_what_an_agent_may_not_return_is_named(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture, returned: Any, named: str
) -> None:
    global answer
    answer = returned
    (sample,) = play(tokenizer, f"{__name__}:returns", samples=1)
    assert sample.grade_reason == "broken: error" and sample.finish_reason == "stop", (
        "it was not cut, nor goes on"
    )
    assert (
        f"rollout.agent: an episode of row row broke: ValueError: the agent returned {named}"
        in caplog.text
    )


def test_what_an_agent_may_return_is_the_samples(tokenizer: TextTokenizer) -> None:
    global answer
    for returned, reward, correct in (
        (1, 1.0, None),
        ({"reward": 0.5, "correct": True}, 0.5, True),
        ({"reward": 0.5, "turn_rewards": (0.25, 1), "correct": False}, 1.75, False),
        ({"turn_rewards": []}, None, None),
        (None, None, None),
    ):
        answer = returned
        (sample,) = play(tokenizer, f"{__name__}:returns", samples=1)
        assert (sample.reward, sample.correct) == (reward, correct)
        assert (sample.turn_rewards is None) == (reward != 1.75)


async def asks_for_proxies(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await returns(task, base_url, http_client)
    return float(http_client.trust_env)


def test_client_of_agents_knows_no_proxies_of_the_environment(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, f"{__name__}:asks_for_proxies", samples=1)
    assert sample.reward == 0


async def goes_on_elsewhere(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    """Two turns of a conversation, and a third of another one."""
    await returns(task, base_url, http_client)
    await http_client.post(
        f"{base_url}/chat/completions", json={"messages": [{"role": "user", "content": "w6"}]}
    )
    return answer


def test_reward_of_a_turn_is_at_its_last_token_in_every_segment(
    tokenizer: TextTokenizer,
) -> None:
    global answer
    answer = {"turn_rewards": [0.25, 0.5, 1.0]}
    (sample,) = play(tokenizer, f"{__name__}:goes_on_elsewhere", samples=1)
    mask = np.asarray(sample.loss_mask)
    rewards = np.asarray(sample.turn_rewards)
    last = np.flatnonzero(mask & ~np.append(mask[1:], False))
    assert len(sample.segment_starts) == 1 and mask.sum() == 3 * WRITTEN
    assert rewards[last].tolist() == [0.25, 0.5, 1.0] and np.count_nonzero(rewards) == 3
