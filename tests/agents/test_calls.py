"""Requests of an episode: streams that wait, clients in other processes, calls that take too long,
the engine."""

import asyncio
import json
import sys
import time
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI
from stub_episodes import WRITTEN, Engine, agents_of, play

from vapo_megatron.agents import direct_transport, endpoint
from vapo_megatron.agents.episodes import episode_metrics, is_whole
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import RunFailed

pytestmark = pytest.mark.usefixtures("fresh")


async def streams(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """By OpenAI's client, over a socket or not, whose patience with silence is shorter than the
    engine takes."""
    patience = httpx.Timeout(0.3)
    async with httpx.AsyncClient(trust_env=False) as by_socket:
        for client in (http_client, by_socket):
            policy = AsyncOpenAI(
                base_url=base_url,
                api_key="none",
                http_client=client,
                timeout=patience,
                max_retries=0,
            )
            asked: dict[str, Any] = {
                "model": "policy",
                "messages": task["messages"],
                "stream": True,
            }
            stream = await policy.chat.completions.create(
                **asked, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
            assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]).split()
            assert parts[-2].choices[0].finish_reason == "stop" and parts[-1].choices == []
            assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == WRITTEN
        with pytest.raises(httpx.ReadTimeout):
            await by_socket.post(
                f"{base_url}/chat/completions",
                json={"messages": task["messages"]},
                timeout=patience,
            )
    return 1.0


@pytest.fixture
def often_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits gives ten signs of life a second."""
    for module in (endpoint, direct_transport):
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.1)


@pytest.mark.usefixtures("often_alive")
def test_a_stream_that_waits_gives_signs_of_life(tokenizer: TextTokenizer) -> None:
    Engine.seconds = 0.6
    (sample,) = play(tokenizer, f"{__name__}:streams", samples=1)
    assert sample.reward == 1.0
    assert sample.episode["turns"] == 2 and Engine.aborted == 1, (
        "the request that was given up leaves no turn"
    )


async def fails_late(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """A second request at the same time waits for the first, and learns only then that there is no
    turn left."""
    async with httpx.AsyncClient(trust_env=False) as client:
        policy = AsyncOpenAI(base_url=base_url, api_key="none", http_client=client, max_retries=0)
        asked: dict[str, Any] = {"model": "policy", "messages": task["messages"], "stream": True}
        first = asyncio.create_task(policy.chat.completions.create(**asked))
        await asyncio.sleep(0.05)
        with pytest.raises(APIError, match=r"rollout\.episode\.max_turns=1 are taken"):
            [_ async for _ in await policy.chat.completions.create(**asked)]
        [_ async for _ in await first]
    return 1.0


@pytest.mark.usefixtures("often_alive")
def test_an_error_after_signs_of_life_is_an_event(tokenizer: TextTokenizer) -> None:
    Engine.seconds = 0.5
    (sample,) = play(tokenizer, f"{__name__}:fails_late", samples=1, max_turns=1)
    assert sample.episode["turns"] == 1 and sample.truncated


CLIENT = """
import json, sys, urllib.request
url, messages = sys.argv[1], json.loads(sys.argv[2])
for word in ("w7", "w8"):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "tool", "content": word}]
print(len(messages))
"""


async def in_a_process(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """An agent that is a program of its own and knows nothing of ours."""

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-c",
        CLIENT,
        base_url,
        json.dumps(task["messages"]),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return float(output)


async def in_this_process(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    messages = list(task["messages"])
    for word in ("w7", "w8"):
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        messages += [answer.json()["choices"][0]["message"], {"role": "tool", "content": word}]
    return float(len(messages))


def test_an_agent_in_a_process_of_its_own_gives_the_same_samples(tokenizer: TextTokenizer) -> None:
    theirs, ours = (
        play(tokenizer, f"{__name__}:{name}") for name in ("in_a_process", "in_this_process")
    )
    assert is_whole(theirs) and [sample.reward for sample in theirs] == [5.0] * 3
    for one, other in zip(theirs, ours, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert (
            one.loss_mask.tolist() == other.loss_mask.tolist()
            and one.loss_mask.sum() == 2 * WRITTEN
        )


def test_an_episode_stays_with_one_engine(tokenizer: TextTokenizer) -> None:
    Engine.seconds = 0.05
    samples = play(tokenizer, f"{__name__}:in_this_process", samples=8, engines=4)
    assert len(set(Engine.urls)) == 4, "episodes are spread over engines"
    assert all(sample.engine and sample.episode["turns"] == 2 for sample in samples), (
        "and each has one"
    )


async def is_slow(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await in_this_process(task, base_url, http_client)
    await asyncio.sleep(5.0)
    return 1.0


async def starts_late(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await asyncio.sleep(5.0)
    return await in_this_process(task, base_url, http_client)


@pytest.mark.parametrize(
    ("name", "engine_seconds"), [("is_slow", 0.0), ("starts_late", 0.0), ("in_this_process", 5.0)]
)
def test_a_call_that_takes_too_long_breaks_its_episode(
    tokenizer: TextTokenizer, name: str, engine_seconds: float
) -> None:
    Engine.seconds = engine_seconds
    started = time.monotonic()
    (sample,) = play(tokenizer, f"{__name__}:{name}", samples=1, call_timeout_s=0.4, timeout_s=60.0)
    assert sample.grade_reason == "broken: call_timeout" and time.monotonic() - started < 4
    (sample,) = play(tokenizer, f"{__name__}:{name}", samples=1, call_timeout_s=60.0, timeout_s=0.4)
    assert sample.grade_reason == "broken: timeout"


def test_calls_within_their_limit_may_take_longer_together(tokenizer: TextTokenizer) -> None:
    Engine.seconds = 0.3
    (sample,) = play(tokenizer, f"{__name__}:in_this_process", samples=1, call_timeout_s=0.5)
    assert sample.reward == 5.0 and episode_metrics([sample])["agent/engine_seconds"] > 0.5


@pytest.mark.parametrize("limit", ["timeout_s", "call_timeout_s"])
def test_waiting_for_room_on_an_engine_does_not_count(tokenizer: TextTokenizer, limit: str) -> None:
    """Twelve episodes of two turns in two places: some wait for longer than they may take."""
    Engine.seconds = 0.15
    started = time.monotonic()
    samples = play(
        tokenizer, f"{__name__}:in_this_process", samples=12, max_running_requests=1, **{limit: 0.6}
    )
    assert is_whole(samples) and time.monotonic() - started > 1.2
    Engine.seconds = 1.0
    (sample,) = play(
        tokenizer, f"{__name__}:in_this_process", samples=1, max_running_requests=1, **{limit: 0.6}
    )
    assert sample.grade_reason == f"broken: {limit.removesuffix('_s')}", (
        "and the engine's own time does"
    )


async def gives_up_and_works(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    with pytest.raises(httpx.ReadTimeout):
        await http_client.post(
            f"{base_url}/chat/completions", json={"messages": task["messages"]}, timeout=0.6
        )
    await asyncio.sleep(0.6)
    return await in_this_process(task, base_url, http_client)


def test_work_after_an_abandoned_request_has_its_own_limit(
    tokenizer: TextTokenizer,
) -> None:
    Engine.hangs = True
    (sample,) = play(tokenizer, f"{__name__}:gives_up_and_works", samples=1, call_timeout_s=1.0)
    assert sample.reward == 5.0


async def has_a_timeout_of_its_own(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await in_this_process(task, base_url, http_client)
    raise TimeoutError("the tool's socket")


def test_an_agents_own_timeout_is_an_error_of_the_agent(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{__name__}:has_a_timeout_of_its_own"
    (sample,) = play(tokenizer, name, samples=1, call_timeout_s=60.0)
    assert sample.grade_reason == "broken: error" and "the tool's socket" in caplog.text
    (sample,) = play(
        tokenizer, f"{__name__}:reaches_a_limit", samples=1, call_timeout_s=60.0, max_turns=1
    )
    assert is_whole([sample]) and sample.truncated


async def reaches_a_limit(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    for _ in range(2):
        await http_client.post(f"{base_url}/chat/completions", json={"messages": task["messages"]})
    raise TimeoutError("after the limit")


async def breaks_at_times(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    global groups
    groups += 1
    if groups != whole_group:
        raise KeyError("of the user's")
    return await in_this_process(task, base_url, http_client)


groups = 0
whole_group = 0


@pytest.mark.parametrize("whole", [0, 16])
def test_sixteen_broken_groups_in_a_row_end_the_run(tokenizer: TextTokenizer, whole: int) -> None:
    global groups, whole_group
    groups = 0
    whole_group = whole
    with agents_of(tokenizer, f"{__name__}:breaks_at_times") as group:
        for number in range(1, 16 + whole):
            assert is_whole(group(1)) == (number == whole)
        with pytest.raises(
            RunFailed,
            match=rf"each of 16 groups one after another \(error {16 + max(whole - 1, 0)}\)",
        ):
            group(1)
