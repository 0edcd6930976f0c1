"""Prompts of later turns: short conversations stand in for long ones, and tokens stay the same."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents_rendering import (
    TOOLS,
    Conversation,
    WholeRenderer,
    byte_tokenizer,
    differences,
    long_requests,
    random_requests,
    with_template,
)
from benchmarks.chat_templates import CHAT_TEMPLATES
from vapo_megatron.agents.rendering import Renderer
from vapo_megatron.agents.stand_ins import Outlines, messages_of
from vapo_megatron.agents.template_traits import TemplateTraits, read_traits
from vapo_megatron.data.tokenizer import TextTokenizer

TURNS = 12


@pytest.fixture(params=CHAT_TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(tmp_path: Path, name: str) -> TextTokenizer:
    return with_template(tmp_path, CHAT_TEMPLATES[name], byte_tokenizer())


def test_tokens_are_those_of_whole_renderings(tokenizer: TextTokenizer, name: str) -> None:
    asked, same, whole, needed = differences(tokenizer, 12, TURNS)
    assert same == asked == 12 * TURNS
    if name == "counts":
        assert whole > needed, "it counts further than a stand-in is long"
    else:
        assert whole == needed, "a history is written again only where the template rewrites it"


def _lengths(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, checked: int
) -> Iterator[tuple[int, list[int]]]:
    """Of each request, its messages, and how many the template was given at its renderings."""
    rendered: list[int] = []
    write = tokenizer.messages_text

    def noted(messages: list[Any], *rest: Any) -> str:
        rendered.append(len(messages))
        return write(messages, *rest)

    monkeypatch.setattr(tokenizer, "messages_text", noted)
    renderer = Renderer(tokenizer)
    renderer.first_checked = checked
    conversation = Conversation(renderer, tokenizer)
    for body, answer in long_requests(40):
        rendered.clear()
        conversation.ask(body)
        conversation.answer(answer)
        yield len(body["messages"]), list(rendered)


@pytest.mark.parametrize("name", ["repeats", "until a question", "until an answer"], indirect=True)
@pytest.mark.parametrize("checked", [0, 200])
def test_a_turn_renders_as_much_however_long_the_history_is(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, checked: int
) -> None:
    requests = [*_lengths(tokenizer, monkeypatch, checked)]
    assert requests[-1][0] == 79
    for _, rendered in requests[20:]:
        assert rendered == [3], "a question, the mark and the tool's answer"
    limit = 20 if checked == 0 else 50
    assert max(max(rendered) for _, rendered in requests[1:]) < limit


def test_a_stand_in_that_is_wrong_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Letters of the whole conversation, which no outline has
    hidden = "{% set many = '700' | int %}{% if messages | string | length > many %}long{% endif %}"
    tokenizer = with_template(tmp_path, hidden + CHAT_TEMPLATES["repeats"], byte_tokenizer())
    assert read_traits(tokenizer.chat_template) is not None
    renderer = Renderer(tokenizer)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            ours = Conversation(renderer, tokenizer)
            theirs = Conversation(WholeRenderer(tokenizer), tokenizer)
            for body, answer in random_requests(seed, TURNS):
                assert ours.ask(body) == theirs.ask(body)
                ours.answer(answer)
                theirs.answer(answer)
            assert len(theirs.recording.segments) > 1
    (record,) = caplog.records
    assert str(tmp_path) in record.message and "rendered whole from now on" in record.message


@pytest.mark.parametrize(
    ("template", "key", "value"),
    [
        ("{{ m.name }}: ", "name", "w1"),
        ("{{ m.tool_calls | tojson if m.tool_calls }}", "tool_calls", {"a": True}),
    ],
)
def test_a_change_that_tokens_show_and_messages_do_not_is_seen(
    tmp_path: Path, template: str, key: str, value: Any
) -> None:
    source = CHAT_TEMPLATES["repeats"].replace("{{ m.content }}", template + "{{ m.content }}")
    tokenizer = with_template(tmp_path, source, byte_tokenizer())
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"a": 1}}}
    opening: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": [call]},
        {"role": "tool", "content": "three", "tool_call_id": "1"},
    ]
    answer = {"role": "assistant", "content": "four"}
    renderer = Renderer(tokenizer)
    renderer.first_checked = 0
    conversation = Conversation(renderer, tokenizer)
    conversation.ask({"messages": opening, "tools": TOOLS})
    conversation.answer(answer)
    changed = copy.deepcopy(opening)
    if key == "name":
        changed[0]["name"] = value
    else:
        changed[1]["tool_calls"][0]["function"]["arguments"] = value
    more = [*changed, answer, {"role": "user", "content": "five"}]
    ids = conversation.ask({"messages": more, "tools": TOOLS})
    assert tokenizer.decode_all(ids) == tokenizer.messages_text(more, TOOLS)


def test_what_holds_with_some_tools_is_asked_again_with_others(tmp_path: Path) -> None:
    source = CHAT_TEMPLATES["repeats"].replace(
        "{{ m.content }}",
        "{{ m.content.split('</think>')[-1] if tools and tools[0].function.name == 'drop' else "
        "m.content }}",
    )
    tokenizer = with_template(tmp_path, source, byte_tokenizer())
    renderer = Renderer(tokenizer)
    renderer.first_checked = 0
    answer = {"role": "assistant", "content": "why</think>so"}
    messages = [{"role": "user", "content": "one"}]
    more = [*messages, answer, {"role": "user", "content": "two"}]
    for name, segments in (("keep", 1), ("drop", 2), ("keep", 1)):
        tools = [{"type": "function", "function": {"name": name, "parameters": {}}}]
        conversation = Conversation(renderer, tokenizer)
        for asked in (messages, more):
            conversation.ask({"messages": asked, "tools": tools})
            conversation.answer(answer)
        assert len(conversation.recording.segments) == segments


TRAITS = TemplateTraits(("</think>", "<think>"), ("image",), frozenset({"none"}), 1, False)


def _outlines(*contents: str, traits: TemplateTraits = TRAITS) -> list[bytes]:
    messages = [{"role": "user", "content": content} for content in contents]
    return Outlines(traits).extended([], messages)


def test_an_outline_has_what_a_template_can_tell_apart() -> None:
    one, same, spaced, none, empty, short = _outlines(
        "a few words", "other\n\nwords", " a few words", "none", "", "x"
    )
    assert one == same and len({one, spaced, none, empty, short}) == 5
    thought, again, reverse, picture = _outlines(
        "<think>why\n</think>so", "<think>how\n</think>thus", "</think>why\n<think>so", "an image"
    )
    assert thought == again and len({one, thought, reverse, picture}) == 4
    many, more = ("".join(["<think>a"] * count + ["</think>b"]) for count in (6, 90))
    assert len({*_outlines(many, more)}) == 1
    assert _outlines(more)[0].count(b"<think>") == 4, "the first two and the last two of each mark"
    lower = TemplateTraits(("YES",), (), frozenset(), 1, True)
    assert len({*_outlines("yes to it", "not to it", traits=lower)}) == 2


def test_ids_of_calls_keep_their_length_and_what_they_refer_to() -> None:
    def turn(*ids: str) -> list[Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "some text"}}}
        calls = [call | {"id": name} for name in ids]
        answers = [{"role": "tool", "content": "text", "tool_call_id": name} for name in ids]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]

    outlines = Outlines(TRAITS)
    first = outlines.extended([], turn("123456789", "abcdefghi"))
    both = [*turn("987654321", "ihgfedcba"), *turn("123456789", "abcdefghi")]
    assert outlines.extended([], both) == outlines.extended(first, both) == [*first, *first]
    assert outlines.extended([], turn("1234", "5678")) != first
    calls, *answers = messages_of([*first, *first])[3:]
    names = [call["id"] for call in calls["tool_calls"]]
    assert [answer["tool_call_id"] for answer in answers] == names
    assert len({*names}) == 2 and all(len(name) == 9 for name in names)
    texts = [answer["content"] for answer in answers]
    assert len({*texts}) == 2, "no two texts are the same"


def test_of_turns_alike_the_first_and_the_last_stay() -> None:
    outlines = Outlines(TRAITS)
    kinds = {kind: f'{{"role":"assistant","{kind}":1}}'.encode() for kind in "abc"}
    history = [b"{}", *(kinds[kind] for kind in "aaabbbabbbbaaaaaa"), kinds["c"], b"{}"]
    chosen, place = outlines.stand_in(history, len(history) - 2)
    letters = "".join(kind for outline in chosen for kind in "abc" if outline == kinds[kind])
    assert letters == "aabbaac" and chosen[place] == kinds["c"]
    with pytest.raises(ValueError, match="too many kinds"):
        outlines.stand_in([b'{"role":"assistant","%d":1}' % n for n in range(99)], 98)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index % 2 }}{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.index > 30 }}{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.index is odd }}{% endfor %}",
        "{% for m in messages | sort %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split(m.role) }}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for m in messages %}",
    ],
)
def test_templates_that_outlines_cannot_answer_for(source: str) -> None:
    assert read_traits(source) is None


def test_traits_are_what_a_template_looks_for() -> None:
    traits = read_traits(
        "{% macro write(tool) %}{{ 99 }}{% endmacro %}{% set end = '</r>' %}{% generation %}"
        "{% for m in messages[-3:] %}{% if m.role == 'user' and 'odd' in m.content %}"
        "{{ m.content.split('<r>')[0].strip('x').split(end) }}{{ 'a %s' % m.content }}"
        "{% endif %}{% endfor %}{% endgeneration %}"
    )
    assert traits == TemplateTraits(
        ("</r>", "<r>"), ("odd",), frozenset({"user", "</r>"}), 3, False
    )
