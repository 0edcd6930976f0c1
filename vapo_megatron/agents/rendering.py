"""Prompts of an episode's requests: the tokens recorded up to now, and the new messages' tokens.

The chat template decides whether the recorded tokens still hold. A short conversation stands in for
the one that is asked about; the whole of it is written where none can.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from vapo_megatron.agents.recording import (
    Compared,
    Message,
    Recording,
    Segment,
    as_templates_read,
    comparable,
)
from vapo_megatron.agents.stand_ins import Outlines, messages_of
from vapo_megatron.agents.template_traits import read_traits
from vapo_megatron.data.tokenizer import TextTokenizer

_logger = logging.getLogger(__name__)
# So many different stand-ins are each compared with the conversation that came with it.
_FIRST_CHECKED = 200
_MOST_KNOWN = 20_000

# Tools, outlines of a stand-in, place of the answer in it.
_Question = tuple[bytes, tuple[bytes, ...], int]


@dataclass
class Prepared:
    """A request before its response.

    Attributes:
        segment: the one that it continues; a new one has no turns.
        observed: tokens of the messages after the policy's last answer.
        messages, shown, outlines: see Segment, which gets them with the response.
    """

    segment: Segment
    observed: list[int]
    messages: list[Message]
    shown: str | None
    outlines: list[bytes]

    def remember(self) -> None:
        """Make it the segment's last request."""
        self.segment.request = self.messages
        self.segment.shown = self.shown
        self.segment.outlines = self.outlines


class Renderer:
    """Prepares requests for the policy, with the tokenizer's chat template."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        traits = read_traits(tokenizer.chat_template)
        self._outlines = None if traits is None else Outlines(traits)
        self._known: dict[_Question, bool] = {}
        self._checked: set[_Question] = set()
        self.first_checked = _FIRST_CHECKED

    def prepare(
        self,
        recording: Recording,
        segment: Segment | None,
        messages: list[Message],
        tools: list[Message],
        may_take_long: bool = True,
    ) -> Prepared | None:
        """The request that these messages are, which continues the segment, or a new one where
        there is none or the template rewrites recorded messages.

        may_take_long: whether the template may write the whole conversation; if not, None where it
            has to.

        Raises:
            ValueError: the template cannot be applied.
        """
        outlines, question = self._question(segment, messages, tools)
        is_repeated = question is not None and self._stand_in_is_repeated(question, tools)
        is_sure = question in self._checked or len(self._checked) >= self.first_checked
        if segment is not None and is_repeated and is_sure:
            after = self._after(segment, messages, tools)
            return Prepared(segment, self._observed(segment, after), messages, None, outlines)
        if not may_take_long:
            return None
        if segment is None:
            shown = self._text(messages, tools)
        else:  # what it has is not written again, so the template need not be able to
            shown = self._text_or_none(messages, tools)
            after = self._after(segment, messages, tools)
            is_kept = is_repeated_in(self._shown(segment), segment.messages[-1], shown, after)
            if question is not None and is_repeated:
                self._compare(question, is_kept)
            else:
                recording.rendered_whole += 1
            if is_kept:
                return Prepared(segment, self._observed(segment, after), messages, shown, outlines)
        prompt = self._tokenizer.encode_response(shown)
        new = Segment([], tools, prompt, by_template=segment is not None)
        return Prepared(new, [], messages, shown, outlines)

    def _question(
        self, segment: Segment | None, messages: list[Message], tools: list[Message]
    ) -> tuple[list[bytes], _Question | None]:
        """The outlines of messages, and what to ask of the template in their place; None: there is
        no stand-in for them."""
        if segment is None or self._outlines is None:
            return [], None
        answer = len(segment.request)
        if not _are_same(messages[:answer], segment.request):
            return [], None
        outlines = self._outlines.extended(segment.outlines, messages)
        try:
            chosen, place = self._outlines.stand_in(outlines, answer)
        except ValueError:
            return outlines, None
        return outlines, (orjson.dumps(tools), chosen, place)

    def _stand_in_is_repeated(self, question: _Question, tools: list[Message]) -> bool:
        if question not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            _, outlines, place = question
            messages = messages_of(outlines)
            earlier = self._text_or_none(messages[:place], tools)
            (answer,) = comparable(messages[place : place + 1])
            is_repeated = False
            with suppress(ValueError):
                after = text_after_answer(
                    lambda given: self._text(given, tools), messages[place + 1 :]
                )
                shown = self._text_or_none(messages, tools)
                is_repeated = is_repeated_in(earlier, answer, shown, after)
            self._known[question] = is_repeated
        return self._known[question]

    def _compare(self, question: _Question, is_kept: bool) -> None:
        """Stop asking stand-ins where one is wrong."""
        if is_kept:
            self._checked.add(question)
        else:
            self._outlines = None
            _logger.warning(
                "%s: its chat template depends on more than short conversations show; every "
                "request is rendered whole from now on, which takes longer",
                self._tokenizer.directory,
            )

    def _after(self, segment: Segment, messages: list[Message], tools: list[Message]) -> str:
        new = messages[len(segment.messages) :]

        def render(given: list[Message]) -> str:
            return self._text(given, tools)

        try:
            return text_after_answer(render, new)
        except ValueError:
            answer = messages[len(segment.messages) - 1]
            drawn = self._end_token(segment)
            if not answer.get("tool_calls") or not drawn:
                raise
            return text_after_call(render, answer, drawn, new)

    def _shown(self, segment: Segment) -> str:
        if segment.shown is None:
            return self._text_or_none(segment.request, segment.tools)
        return segment.shown

    def _text_or_none(self, messages: list[Message], tools: list[Message]) -> str:
        """Messages by the chat template; empty if it cannot."""
        try:
            return self._text(messages, tools)
        except ValueError:
            return ""

    def _text(self, messages: list[Message], tools: list[Message]) -> str:
        """Messages by the chat template; the arguments of calls are objects, or JSON if it cannot
        read these."""
        try:
            return self._tokenizer.messages_text(messages, tools)
        except ValueError:
            with suppress(ValueError):
                return self._tokenizer.messages_text(
                    [as_templates_read(m, as_json=True) for m in messages], tools
                )
            raise

    def _end_token(self, segment: Segment) -> str:
        """The token with which the policy ended its last answer; empty if it did not."""
        last = segment.turns[-1]
        if last.truncated:
            return ""
        return self._tokenizer.decode_all(last.response_ids[-1:].tolist())

    def _observed(self, segment: Segment, text: str) -> list[int]:
        """Tokens of the text after the policy's last answer, without its end token if it drew
        one."""
        drawn = self._end_token(segment)
        if drawn and text.lstrip().startswith(drawn):
            text = text.lstrip().removeprefix(drawn)
        return self._tokenizer.encode_response(text)


def is_repeated_in(earlier: str, answer: Compared, shown: str, after: str) -> bool:
    """Whether a request as the chat template writes it repeats the request before it and its answer
    unchanged, except for whitespace and the spelling of tool calls. Templates may drop the
    reasoning of earlier turns, for example.

    earlier, shown: both requests; empty if the template could not. after: the part of `shown` that
        follows the answer.
    """
    if not earlier or not shown:
        return True
    same = len(earlier) if shown.startswith(earlier) else 0
    before, text, after = ("".join(part.split()) for part in (earlier[same:], shown[same:], after))
    if not text.startswith(before) or not text[len(before) :].endswith(after):
        return False
    repeated = text[len(before) :].removesuffix(after)
    _, content, calls = answer
    written = "".join(content.split())
    return repeated.startswith(written) if calls else repeated == written


def _are_same(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether messages are the same in every field, of every type."""
    return all(
        one is other or orjson.dumps(one) == orjson.dumps(other)
        for one, other in zip(messages, others, strict=True)
    )


# Stands for an assistant's message where a template renders what follows one. No tokenizer
# cuts it.
_MARK = "vapomegatronmark"


def text_after_answer(render: Callable[[list[Message]], str], new: Sequence[Message]) -> str:
    """The text that a chat template puts between an assistant's text and the assistant's next turn.

    It is taken from a conversation of one question and a mark, so that earlier tokens of the policy
    stay as drawn, however the template spells them.

    Raises:
        ValueError: the template does not repeat an assistant's message.
    """
    text = render([{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *new])
    _, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the chat template does not repeat an assistant's message")
    return after


def text_after_call(
    render: Callable[[list[Message]], str], answer: Message, drawn: str, new: Sequence[Message]
) -> str:
    """As text_after_answer, for a template that takes a tool's result only behind a call
    (gpt-oss's): from the token that ended the answer on.

    Args:
        answer: the assistant's message, with tool calls.
        drawn: the token with which the policy ended it.

    Raises:
        ValueError: the template does not repeat the call, or ends it otherwise.
    """
    call = answer["tool_calls"][-1]
    function = call["function"]
    names = function["arguments"] if isinstance(function["arguments"], dict) else ()
    marked = {**call, "function": {**function, "arguments": dict.fromkeys(names or ["x"], _MARK)}}
    calls = [*answer["tool_calls"][:-1], marked]
    text = render(
        [
            {"role": "user", "content": "."},
            {**answer, "content": "", "tool_calls": calls},
            *new,
        ]
    )
    _, mark, after = text.rpartition(_MARK)
    place = after.find(drawn)
    if not mark or place < 0:
        raise ValueError("the chat template does not repeat an assistant's call")
    return after[place:]
