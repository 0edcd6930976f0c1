"""What a chat template makes of earlier turns, and of tools."""

import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_episodes import Engine, fresh_engine, make_tokenizer, play

from vapo_megatron.agents.recording import Segment, as_templates_read
from vapo_megatron.agents.rendering import is_repeated_in
from vapo_megatron.data.tokenizer import TextTokenizer

# As Qwen3's: reasoning stays in the turns since the last question, and is dropped before.
DROPPING = (
    "{% for t in tools or [] %}<bos> tool {{ t['function']['name'] }} <eos> {% endfor %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set "
    "ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<bos> {{ m['role'] }} "
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ "
    "m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %} call {{ c['function']['name'] }} {{ "
    "c['function']['arguments']['a'] }}{% endfor %} <eos> {% endfor %}{% if add_generation_prompt "
    "%}<bos> assistant {% endif %}"
)
# Adds words after a tool has answered: to the question, or to the answer before it.
ADDING = DROPPING.replace(
    "{{ m['content'] }}{% endif %}",
    "{{ m['content'] }}{% endif %}{{ ' w99' if messages|length > 2 and loop.first }}",
)
ADDING_BEFORE = DROPPING.replace(
    "{% else %}{{", "{% else %}{{ 'w98 ' if m['role'] == 'assistant' }}{{"
)
# As Llama 3.1's, DeepSeek R1's and Mistral's.
ONE_CALL = (
    "{% for m in messages if (m['tool_calls'] or [])|length > 1 %}{{ raise_exception('one call') "
    "}}{% endfor %}"
)
ONE_CALL += DROPPING
JOINS = ("{{ c['function']['arguments']['a'] }}", "{{ 'with ' + c['function']['arguments'] }}")
JOINING = DROPPING.replace(*JOINS)
NINE = (
    "{% for m in messages if m['tool_call_id'] and m['tool_call_id']|length != 9 %}{{ "
    "raise_exception('id') }}"
)
NINE += "{% endfor %}" + DROPPING
# As gpt-oss's: a tool's result needs a call before it.
AFTER_A_CALL = (
    "{% set ns = namespace(call=false) %}{% for m in messages %}{% if m['tool_calls'] %}"
    "{% set ns.call = true %}{% elif m['role'] == 'tool' and not ns.call %}"
    "{{ raise_exception('no call before it') }}{% endif %}{% endfor %}"
)
AFTER_A_CALL += DROPPING
WORDS = (
    "user",
    "assistant",
    "tool",
    "system",
    "<think>",
    "</think>",
    "call",
    "add",
    "with",
    '{"a":',
    '"w2"}',
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    fresh_engine()


def tokenizer_with(folder: Path, template: str) -> TextTokenizer:
    return make_tokenizer(folder, template, WORDS)


async def ask(
    http_client: Any, base_url: str, messages: list[Any], tools: Any = None
) -> dict[str, Any]:
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": messages, "tools": tools}
    )
    answer.raise_for_status()
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    messages.append(message)
    return message


async def asks_again(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    messages = list(task["messages"])
    for role in ("tool", "user", "user"):
        await ask(http_client, base_url, messages)
        messages.append({"role": role, "content": "w8"})
    await ask(http_client, base_url, messages)
    return 1.0


def script(tokenizer: TextTokenizer, *turns: str) -> list[list[int]]:
    return [tokenizer.encode_response(turn) for turn in turns]


def test_template_that_drops_reasoning_begins_a_segment(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_with(tmp_path, DROPPING)
    turns = ("<think> w1 </think> w2 <eos>", "<think> w3 </think> w4 <eos>", "w5 <eos>", "w6 <eos>")
    Engine.script = script(tokenizer, *turns)
    (sample,) = play(tokenizer, f"{__name__}:asks_again", samples=1)
    asked = [tokenizer.decode_all(prompt) for prompt in Engine.prompts]
    opening = "<bos> user w3 w4 <eos> <bos> assistant"
    assert asked[0] == opening
    assert asked[1] == f"{opening} {turns[0]} <bos> tool w8 <eos> <bos> assistant", (
        "reasoning stays before a tool"
    )
    # At the second question the template forgets the reasoning of both turns before it.
    forgotten = (
        f"{opening} w2 <eos> <bos> tool w8 <eos> <bos> assistant w4 <eos> <bos> user w8 <eos> "
        f"<bos> assistant"
    )
    assert asked[2] == forgotten
    assert asked[3] == f"{forgotten} {turns[2]} <bos> user w8 <eos> <bos> assistant", (
        "an answer without reasoning stays"
    )
    assert sample.episode["segments"] == 2 and sample.episode["segments_by_template"] == 1
    assert sample.episode["rendered_whole"] == 1
    (start,) = sample.segment_starts
    ids = np.asarray(sample.response_ids)
    mask = np.asarray(sample.loss_mask)
    assert tokenizer.decode_all(ids[start:].tolist()).startswith(forgotten)
    assert tokenizer.decode_all(ids[mask].tolist()) == " ".join(turns), (
        "what was drawn is trained as it was drawn"
    )


async def calls_a_tool(task: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    messages = list(task["messages"])
    message = await ask(http_client, base_url, messages, TOOLS)
    (call,) = message["tool_calls"]
    assert message["content"].split() == ["w1"] and call["function"] == {
        "name": "add",
        "arguments": '{"a": "w2"}',
    }
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "w7"})
    assert "tool_calls" not in await ask(http_client, base_url, messages, TOOLS)
    return {"reward": 1.0}


@pytest.mark.parametrize(("template", "segments"), [(DROPPING, 1), (AFTER_A_CALL, 1), (ADDING, 2)])
def test_a_tool_call_is_parsed_answered_and_kept_as_drawn(
    tmp_path: Path, template: str, segments: int
) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    Engine.script = script(tokenizer, "w1 add w2 <eos>", "w9 <eos>")
    (sample,) = play(tokenizer, f"{__name__}:calls_a_tool", samples=1, tool_parser="words")
    assert sample.reward == 1.0 and sample.episode["segments"] == segments
    assert sample.episode["segments_by_template"] == segments - 1
    first, second = (tokenizer.decode_all(prompt) for prompt in Engine.prompts)
    assert first == "<bos> tool add <eos> <bos> user w3 w4 <eos> <bos> assistant"
    rest = "<bos> tool w7 <eos> <bos> assistant"
    if segments == 1:  # its call is spelled as the policy did, not as the template does
        assert second == f"{first} w1 add w2 <eos> {rest}"
    else:
        assert second == f"{first.replace('w4', 'w4 w99')} w1 call add w2 <eos> {rest}", (
            "arguments are objects there"
        )


async def calls_tools(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    messages = list(task["messages"])
    ids = []
    for _ in range(2):
        calls = (await ask(http_client, base_url, messages, TOOLS))["tool_calls"]
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "w7"} for call in calls
        ]
        ids += [call["id"] for call in calls]
    assert all(len(name) == 9 and name.isalnum() for name in ids) and len({*ids}) == 4
    await ask(http_client, base_url, messages, TOOLS)
    return 1.0


@pytest.mark.parametrize(
    "template", [ONE_CALL, JOINING, NINE], ids=["one call", "joins arguments", "ids of nine"]
)
def test_calls_that_a_template_cannot_repeat_stay_as_drawn(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    turns = ("w1 add w2 add w3 <eos>", "add w4 add w5 <eos>", "w9 <eos>")
    Engine.script = script(tokenizer, *turns)
    (sample,) = play(tokenizer, f"{__name__}:calls_tools", samples=1, tool_parser="words")
    assert sample.reward == 1.0 and sample.episode["segments"] == 1
    rest = "<bos> tool w7 <eos> <bos> tool w7 <eos> <bos> assistant"
    opening = tokenizer.decode_all(Engine.prompts[0])
    assert (
        tokenizer.decode_all(Engine.prompts[2]) == f"{opening} {turns[0]} {rest} {turns[1]} {rest}"
    )


def test_template_that_joins_arguments_to_text_begins_a_segment(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, ADDING.replace(*JOINS))
    Engine.script = script(tokenizer, "w1 add w2 <eos>", "w9 <eos>")
    (sample,) = play(tokenizer, f"{__name__}:calls_a_tool", samples=1, tool_parser="words")
    assert sample.reward == 1.0 and sample.episode["segments_by_template"] == 1
    assert 'w99 <eos> <bos> assistant w1 call add with {"a": "w2"} <eos>' in tokenizer.decode_all(
        Engine.prompts[1]
    )


async def rewrites_a_call(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    calls = [
        {
            "id": "123456789",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": "w2"}'},
        }
    ] * 2
    await ask(
        http_client,
        base_url,
        [*task["messages"], {"role": "assistant", "content": "", "tool_calls": calls}],
    )
    return 1.0


def test_a_new_segment_needs_a_template_that_can_write_it(tmp_path: Path) -> None:
    (sample,) = play(tokenizer_with(tmp_path, ONE_CALL), f"{__name__}:rewrites_a_call", samples=1)
    assert sample.grade_reason == "broken: template" and not Engine.prompts


def test_a_request_continues_what_it_extends_with_the_same_tools() -> None:
    history: list[Any] = [("user", "w1", []), ("assistant", "w2", [])]
    segment = Segment(history, TOOLS, [])
    more = [("user", "w3", [])]
    assert segment.continues_in(history + more, TOOLS)
    assert not segment.continues_in(history, TOOLS), "nothing new to answer"
    assert not segment.continues_in(history + more, []) and not segment.continues_in(
        more + history, TOOLS
    )


def test_a_long_history_is_compared_letter_by_letter_first() -> None:
    before = "some words of a long history\n" * 20_000
    answer: Any = ("assistant", "w1 w2", [])
    texts = [before + "w1 w2 <eos>", before.replace("\n", "\n\n") + "w1\nw2<eos>"]
    for text in texts:
        assert is_repeated_in(before, answer, text, "<eos>")
        for other in (text.replace("w1", "w3"), "x" + text, text + "."):
            assert not is_repeated_in(before, answer, other, "<eos>")
    same, spaced = (
        min(timeit.repeat(lambda t=t: is_repeated_in(before, answer, t, "<eos>"), number=1))
        for t in texts
    )
    assert same * 5 < spaced


async def chats(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    messages = list(task["messages"])
    await ask(http_client, base_url, messages)
    await ask(http_client, base_url, [*messages, {"role": "tool", "content": "w8"}])
    return 1.0


@pytest.mark.parametrize(("template", "segments"), [(DROPPING, 1), (ADDING, 2), (ADDING_BEFORE, 2)])
def test_template_that_adds_to_earlier_messages_begins_a_segment(
    tmp_path: Path, template: str, segments: int
) -> None:
    (sample,) = play(tokenizer_with(tmp_path, template), f"{__name__}:chats", samples=1)
    assert (
        sample.episode["segments"] == segments
        and sample.episode["segments_by_template"] == segments - 1
    )


async def sends_tools(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": task["messages"], "tools": TOOLS}
    )
    assert answer.status_code == 400 and "it ignores tools" in answer.json()["error"]["message"]
    answer.raise_for_status()
    return 1.0


def test_ignored_tools_are_an_error_and_break_the_episode(tmp_path: Path) -> None:
    plain = DROPPING[DROPPING.index("{% set") :]
    tokenizer = tokenizer_with(tmp_path, plain)
    assert not tokenizer.reads_tools and tokenizer_with(tmp_path, DROPPING).reads_tools
    samples = play(tokenizer, f"{__name__}:sends_tools")
    assert {sample.grade_reason for sample in samples} == {
        "broken: template"
    } and not Engine.prompts


def test_messages_are_spelled_as_templates_read_them() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": [1]}'}}
    spelled = as_templates_read({"role": "assistant", "content": None, "tool_calls": [call]})
    assert spelled["content"] == "" and spelled["tool_calls"][0]["function"]["arguments"] == {
        "a": [1]
    }
    call["function"] = {"name": "add", "arguments": {"a": "é"}}
    (text,) = as_templates_read({"role": "assistant", "tool_calls": [call]}, as_json=True)[
        "tool_calls"
    ]
    assert text["function"]["arguments"] == '{"a": "é"}'
    call["function"] = {"name": "add", "arguments": "{no json"}
    for as_json in (False, True):
        assert as_templates_read({"role": "assistant", "tool_calls": [call]}, as_json)[
            "tool_calls"
        ] == [call]
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "w1 "}, picture, {"type": "text", "text": "w2"}]
    assert as_templates_read({"role": "tool", "content": parts, "tool_calls": None}) == {
        "role": "tool",
        "content": "w1 w2",
    }
