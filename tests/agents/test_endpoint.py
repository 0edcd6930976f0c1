"""The endpoint, with engines that answer at once: its ways in, its errors, its limits, and figures
by turn."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import stub_episodes
from stub_episodes import WRITTEN, Engine

from vapo_megatron.agents.episodes import episode_metrics, is_whole
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import TryAgain

pytestmark = pytest.mark.usefixtures("fresh")


def play(tokenizer: TextTokenizer, name: str, samples: int = 3, **limits: Any) -> list[Sample]:
    return stub_episodes.play(tokenizer, f"{__name__}:{name}", samples, **limits)


async def _talk(
    client: httpx.AsyncClient, task: dict[str, Any], base_url: str, turns: int = 3
) -> list[httpx.Response]:
    """Turns after each of which two words are given, until one is refused."""
    messages = list(task["messages"])
    answers = []
    for turn in range(turns):
        answers.append(
            await client.post(f"{base_url}/chat/completions", json={"messages": messages})
        )
        if answers[-1].status_code != 200:
            break
        reply = answers[-1].json()["choices"][0]["message"]
        messages += [
            reply,
            {"role": "tool", "content": [{"type": "text", "text": f"w{turn} w{turn}"}]},
        ]
        await asyncio.sleep(0.02)
    return answers


async def by_its_client(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return float(len(await _talk(http_client, task, base_url)))


async def by_a_socket(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        answers = await _talk(client, task, base_url)
        lost = await client.post(
            f"{base_url[:-8]}elsewhere/v1/chat/completions", json={"messages": task["messages"]}
        )
        assert lost.status_code == 404 and lost.json()["error"]["code"] == "not_found"
    return float(len(answers))


def test_request_from_another_process_is_answered_like_agents(
    tokenizer: TextTokenizer,
) -> None:
    direct = play(tokenizer, "by_its_client")
    by_http = play(tokenizer, "by_a_socket")
    assert is_whole(direct) and [sample.reward for sample in direct + by_http] == [3.0] * 6
    for ours, theirs in zip(direct, by_http, strict=True):
        assert (
            ours.response_ids.tolist() == theirs.response_ids.tolist() and ours.seed == theirs.seed
        )
        assert (
            ours.loss_mask.sum() == 3 * WRITTEN
            and ours.segment_starts == () == theirs.segment_starts
        )


async def gives_up(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    with pytest.raises(httpx.ReadTimeout, match="no answer within"):
        await http_client.post(
            f"{base_url}/chat/completions", json={"messages": task["messages"]}, timeout=0.2
        )
    Engine.hangs = False
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": task["messages"]}
    )
    return np.float32(answer.status_code)  # type: ignore[return-value]


def test_a_clients_own_timeout_ends_its_request_alone(tokenizer: TextTokenizer) -> None:
    Engine.hangs = True
    (sample,) = play(tokenizer, "gives_up", samples=1)
    assert (
        sample.reward == 200.0
        and type(sample.reward) is float
        and len(sample.response_ids) == WRITTEN
    )


async def sends_nonsense(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    good = task["messages"]
    calls = [{"function": {"name": "add"}}]
    for body in (
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {"messages": []},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": good, "tools": "add"},
        {"messages": [{"role": "user", "content": [7]}]},
        {"messages": good, "max_tokens": [1]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]},
    ):
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await http_client.post(f"{base_url}/chat/completions", **given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), (
            body
        )
    return await by_its_client(task, base_url, http_client)


def test_nonsense_is_refused_and_leaves_the_episode_as_it_was(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "sends_nonsense", samples=1)
    assert sample.reward == 3.0 and sample.episode["turns"] == 3 and sample.episode["segments"] == 1


async def listens_to_the_limit(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """As an agent does that knows OpenAI's error: it ends where the context does."""
    *_, last = await _talk(http_client, task, base_url, turns=9)
    errors.append({"status": last.status_code, **last.json()["error"]})
    return 0.75


errors: list[dict[str, Any]] = []  # what an agent raises at a limit is not seen


async def falls_over_the_limit(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    (*_, last) = await _talk(http_client, task, base_url, turns=9)
    last.raise_for_status()
    return 0.75


@pytest.mark.parametrize("name", ["listens_to_the_limit", "falls_over_the_limit"])
def test_episode_beyond_the_context_is_cut_there_and_counted(
    tokenizer: TextTokenizer, name: str
) -> None:
    errors.clear()
    samples = play(tokenizer, name, max_tokens=40)
    uncut = play(tokenizer, "by_its_client")
    for error in errors:
        assert error["status"] == 400 and error["code"] == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in error["message"]
    assert len(errors) == (3 if name == "listens_to_the_limit" else 0)
    row = episode_metrics(samples)
    assert is_whole(samples) and row["agent/cut_by_tokens"] == 1 and row["agent/cut_by_turns"] == 0
    for sample, longer in zip(samples, uncut, strict=True):
        count = min(len(sample.response_ids), len(longer.response_ids))
        assert sample.response_ids[:count].tolist() == longer.response_ids[:count].tolist()
        assert (
            sample.truncated
            and sample.reward is None
            and len(sample.prompt.token_ids) + len(sample.response_ids) <= 40
        )
        assert sample.loss_mask[-1], "what it was given last, and did not answer, is not in it"
    row = episode_metrics(play(tokenizer, "by_its_client", max_turns=2))
    assert (
        row["agent/cut_by_turns"] == 1
        and row["agent/cut_by_tokens"] == 0
        and row["agent/turns"] == 2
    )
    assert (
        episode_metrics(uncut)["agent/cut_by_turns"]
        == episode_metrics(uncut)["agent/cut_by_tokens"]
        == 0
    )


async def has_no_room(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    answers = await _talk(
        http_client, {"messages": [{"role": "user", "content": "w1 " * 50}]}, base_url
    )
    assert answers[0].json()["error"]["code"] == "context_length_exceeded"
    return 1.0


def test_an_episode_whose_first_message_has_no_room_is_broken(tokenizer: TextTokenizer) -> None:
    samples = play(tokenizer, "has_no_room", max_tokens=40)
    assert {sample.grade_reason for sample in samples} == {"broken: no_turn"} and Engine.calls == 0


async def is_graded_by_turn(
    task: dict[str, Any], base_url: str, http_client: Any
) -> dict[str, Any]:
    turns = len(await _talk(http_client, task, base_url))
    return {"reward": 0.0, "turn_rewards": [0.5] * turns, "tool_errors": [0, 1, 2]}


def test_figures_are_broken_down_by_turn(tokenizer: TextTokenizer) -> None:
    samples = play(tokenizer, "is_graded_by_turn")
    row = episode_metrics([*samples, *play(tokenizer, "stops_early", samples=1)])
    for turn, share in ((1, 1.0), (2, 0.75), (3, 0.75)):
        assert row[f"agent/episodes/turn_{turn}"] == share
        assert row[f"agent/tokens_written/turn_{turn}"] == WRITTEN
        assert row[f"agent/tokens_observed/turn_{turn}"] == (
            0 if turn == 1 else (~samples[0].loss_mask).sum() / 2
        )
        assert row[f"agent/engine_seconds/turn_{turn}"] > 0
    assert row["agent/tool_seconds/turn_2"] >= 0.02, (
        "what the agent does between answer and next request"
    )
    assert [row[f"agent/tool_errors/turn_{turn}"] for turn in (1, 2, 3)] == [0, 1, 2]
    assert row["agent/reward/turn_2"] == 0.5 and "agent/episodes/turn_4" not in row
    assert row["agent/tool_errors"] == 3 * 3 / 4, "the other episode had none"
    whole = samples[0].episode
    for name in ("tokens_written", "tokens_observed", "engine_seconds"):
        assert sum(whole[f"{name}/turn_{turn}"] for turn in (1, 2, 3)) == pytest.approx(whole[name])
    long = episode_metrics(play(tokenizer, "goes_on", samples=1))
    assert (
        "agent/episodes/turn_8" in long
        and "agent/episodes/turn_9" not in long
        and long["agent/turns"] == 10
    )


async def stops_early(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return float(len(await _talk(http_client, task, base_url, turns=1)))


async def goes_on(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return float(len(await _talk(http_client, task, base_url, turns=10)))


@pytest.mark.parametrize("errors", [[1], [1, 2, float("nan")], "two", True])
def test_errors_by_turn_are_one_for_each(tokenizer: TextTokenizer, errors: Any) -> None:
    global miscounted
    miscounted = errors
    (sample,) = play(tokenizer, "miscounts", samples=1)
    assert sample.grade_reason == "broken: error"


miscounted: Any = None


async def miscounts(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    await _talk(http_client, task, base_url)
    return {"reward": 1.0, "tool_errors": miscounted}


async def loses_patience(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await _talk(http_client, task, base_url, turns=1)
    return await by_its_client(task, base_url, http_client)


def test_a_request_that_is_given_up_leaves_no_turn(tokenizer: TextTokenizer) -> None:
    Engine.hangs = True
    (sample,) = play(tokenizer, "loses_patience", samples=1)
    (patient,) = play(tokenizer, "by_its_client", samples=1)
    assert Engine.aborted == 1 and sample.episode["segments"] == 1
    assert sample.response_ids.tolist() == patient.response_ids.tolist(), (
        "its seeds go by turns, not by requests"
    )


async def swallows(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    answers = await _talk(http_client, task, base_url)
    return float(answers[-1].status_code)


def test_failure_of_the_last_engine_is_no_broken_episode(
    tokenizer: TextTokenizer,
) -> None:
    Engine.gone_at = 4
    with pytest.raises(TryAgain, match="the server is gone"):
        play(tokenizer, "swallows")


async def spells_otherwise(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """The same history in another spelling, then one with a word changed in it."""
    url = f"{base_url}/chat/completions"
    turns = []
    for opening in ("w5", [{"type": "text", "text": "w5"}], "w6"):
        turns = [
            {"role": "user", "content": opening},
            *turns[1:],
            *([{"role": "user", "content": "w8"}] if turns else []),
        ]
        answer = await http_client.post(url, json={"messages": turns})
        turns.append(answer.json()["choices"][0]["message"])
    return 1.0


def test_only_a_changed_history_begins_a_segment(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "spells_otherwise", samples=1)
    assert sample.episode["segments"] == 2 and sample.episode["turns"] == 3
    assert sample.episode["tokens_rewritten"] > 0 and len(sample.segment_starts) == 1


SAID = {
    "an image": {
        "content": [
            {"type": "text", "text": "w1"},
            {"type": "image_url", "image_url": {"url": "data:,"}},
        ]
    },
    "stop": {"stop": ["w5"]},
    "tool_choice": {"tool_choice": "none"},
    "response_format": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "presence_penalty": {"presence_penalty": 0.5},
    "best_of": {"best_of": 2},
}
answers: list[Any] = []


async def asks_for_more(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    url = f"{base_url}/chat/completions"
    answers.clear()
    for wish in SAID.values():
        body = {"messages": task["messages"]} | wish
        if "content" in wish:
            body = {"messages": [{"role": "user"} | wish]}
        answers.append(await http_client.post(url, json=body))
    harmless = {"stop": None, "n": 1, "tool_choice": "auto", "temperature": 0.2, "seed": 1}
    harmless |= {"response_format": {"type": "text"}, "frequency_penalty": 0.0, "user": "me"}
    answer = await http_client.post(url, json={"messages": task["messages"]} | harmless)
    return float(answer.status_code)


def test_what_is_not_honoured_is_refused_by_name(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "asks_for_more", samples=1)
    assert sample.reward == 200.0 and sample.episode["turns"] == 1
    for name, answer in zip(SAID, answers, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert name.removeprefix("an ").split("_")[0] in error["message"]


async def sends_wrong_types(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    for wish in ({"max_tokens": -1}, {"max_tokens": 0}, {"stream": True, "stream_options": 5}):
        answer = await http_client.post(
            f"{base_url}/chat/completions", json={"messages": task["messages"]} | wish
        )
        assert answer.json()["error"]["code"] == "invalid_request", wish
    return await by_its_client(task, base_url, http_client)


def test_a_wrong_type_is_refused_before_its_turn(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "sends_wrong_types", samples=1)
    assert sample.reward == 3.0 and sample.finish_reason == "stop"


async def speaks_as_a_developer(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    messages = [{"role": "developer", "content": "w7"}, *task["messages"]]
    answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
    return float(answer.status_code)


def test_a_developers_message_is_a_systems(tmp_path: Path) -> None:
    template = "{% for m in messages if m['role'] != 'developer' %}{{ m['content'] }} {% endfor %}"
    tokenizer = stub_episodes.make_tokenizer(tmp_path, template)
    (sample,) = play(tokenizer, "speaks_as_a_developer", samples=1)
    assert sample.reward == 200.0
    assert sample.prompt.token_ids == tuple(tokenizer.encode_response("w7 w3 w4"))


async def sends_a_novel(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    body = {"messages": [{"role": "user", "content": "w3 " * 1_000_000}]}
    answer = await http_client.post(f"{base_url}/chat/completions", json=body)
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "characters" in error["message"]
    return await by_its_client(task, base_url, http_client)


def test_a_text_beyond_the_context_is_not_tokenised(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = tokenizer.encode_response
    monkeypatch.setattr(
        tokenizer, "encode_response", lambda text: (lengths.append(len(text)), encode(text))[1]
    )
    (sample,) = play(tokenizer, "sends_a_novel", samples=1)
    assert sample.reward == 3.0 and max(lengths) < 1000


async def sends_to_a_stranger(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """A body of 64 MiB, announced and never sent, under a path that no episode has."""
    host, port = base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path = "/no-such-secret/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {64 << 20}\r\n\r\n"
    writer.write(head.encode() + b"x" * 1000)
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert b" 404 " in status
    return await by_its_client(task, base_url, http_client)


def test_a_secret_is_read_before_a_body(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "sends_to_a_stranger", samples=1)
    assert sample.reward == 3.0


async def sends_much(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    body = {"messages": [{"role": "user", "content": "w3 " * 20_000}]}
    answer = await http_client.post(f"{base_url}/chat/completions", json=body)
    assert answer.status_code == 200
    return await by_its_client(task, base_url, http_client)


def test_a_long_text_is_not_tokenised_on_the_loop(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[bool, set[str]] = {True: set(), False: set()}
    encode = tokenizer.encode_response

    def noted(text: str) -> list[int]:
        threads[len(text) > 20_000].add(threading.current_thread().name)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_response", noted)
    (sample,) = play(tokenizer, "sends_much", samples=1, max_tokens=40_000)
    assert sample.reward == 3.0
    assert threads[False] == {"rollout"} and threads[True] and "rollout" not in threads[True]


async def gives_two_results(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """Two tool results in a row, which some trainers render one by one (THUDM/slime 2263)."""
    messages = list(task["messages"])
    for _ in range(2):
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        messages.append(answer.json()["choices"][0]["message"])
        messages += [{"role": "tool", "content": word} for word in ("w7", "w8")]
    return 1.0


def test_consecutive_tool_results_are_one_observation(tokenizer: TextTokenizer) -> None:
    (sample,) = play(tokenizer, "gives_two_results", samples=1)
    (first, second) = sample.turns
    given = sample.response_ids[first[1] : second[0]].tolist()
    assert given == tokenizer.encode_response("<bos> w7 <eos> <bos> w8 <eos>")
    assert sample.segment_starts == () and not sample.loss_mask[first[1] : second[0]].any()
