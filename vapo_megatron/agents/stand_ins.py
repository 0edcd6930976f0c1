"""Short conversations in place of long ones, to ask a chat template whether it repeats earlier
turns.

An outline is a message without what the template cannot tell apart. Of turns with the same outline
a stand-in has the first and the last, so it stays short however long the conversation becomes.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import orjson

from vapo_megatron.agents.recording import Message
from vapo_megatron.agents.template_traits import TemplateTraits

_LONGEST = 64  # messages; rendering these takes about a millisecond
# Private characters. They stand for a text, and for the ids of a turn's calls.
_TEXT = "\ue000"
_FIRST_ID = 0xE100
_MOST_IDS = 256
_IDS = re.compile(f"[{chr(_FIRST_ID)}-{chr(_FIRST_ID + _MOST_IDS - 1)}]+")
_SPACE = re.compile(r"\s*")
_ASSISTANT = b'"role":"assistant"'


class Outlines:
    """Makes outlines of messages, and stand-ins of outlines."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self._flags = re.IGNORECASE if traits.ignores_case else re.NOFLAG

    def extended(self, outlines: list[bytes], messages: Sequence[Message]) -> list[bytes]:
        """The outlines of messages, the first of which have these; an answer follows them. The ids
        of calls are numbered from each answer on."""
        ids = dict[str, int]()
        new = []
        for message in messages[len(outlines) :]:
            if message["role"] == "assistant":
                ids = {}
            new.append(orjson.dumps(self._of_message(message, ids)))
        return outlines + new

    def stand_in(self, outlines: Sequence[bytes], answer: int) -> tuple[tuple[bytes, ...], int]:
        """Outlines of the messages that a stand-in has, and the place of the answer among them,
        whose place in the conversation is given.

        Raises:
            ValueError: it would be too long.
        """
        starts = [n for n, outline in enumerate(outlines[:answer]) if _ASSISTANT in outline]
        turns = [tuple(outlines[start:end]) for start, end in itertools.pairwise([*starts, answer])]
        edge = self._traits.largest + 1
        first = dict[tuple[bytes, ...], int]()
        last = dict[tuple[bytes, ...], int]()
        for number, turn in enumerate(turns):
            first.setdefault(turn, number)
            last[turn] = number
        kept = {*first.values(), *last.values()}
        kept |= {*range(edge), *range(len(turns) - edge, len(turns))}
        before = [
            *outlines[: starts[0] if starts else answer],
            *(outline for number, turn in enumerate(turns) if number in kept for outline in turn),
        ]
        chosen = (*before, *outlines[answer:])
        if len(chosen) > _LONGEST:
            raise ValueError("the conversation has too many kinds of turns")
        return chosen, len(before)

    def _of_message(self, message: Message, ids: dict[str, int]) -> Message:
        outline = {
            name: value if name == "role" else self._of(value) for name, value in message.items()
        }
        if message.get("tool_calls"):
            calls = zip(outline["tool_calls"], message["tool_calls"], strict=True)
            outline["tool_calls"] = [
                {**short, **self._numbered(call, "id", ids)}
                | {"function": {**short["function"], "name": call["function"]["name"]}}
                for short, call in calls
            ]
        return outline | self._numbered(message, "tool_call_id", ids)

    def _numbered(self, owner: Message, name: str, ids: dict[str, int]) -> Message:
        """The id under this name, of the same length."""
        value = owner.get(name)
        if not isinstance(value, str) or not value:
            return {}
        number = ids.setdefault(value, len(ids) % _MOST_IDS)
        return {name: chr(_FIRST_ID + number) * len(value)}

    def _of(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._of_text(value)
        if isinstance(value, dict):
            return {name: self._of(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._of(entry) for entry in value]
        if isinstance(value, bool) or not value:
            return value
        return type(value)(self._traits.largest + 1)

    def _of_text(self, text: str) -> str:
        traits = self._traits
        if not text or text.strip() in traits.words:
            return text
        if len(text) <= traits.largest:  # shorter than what the template can count
            return "".join("x" if letter.isalnum() else letter for letter in text)
        searched = text.lower() if traits.ignores_case else text
        has = [
            mark
            for mark in traits.marks
            if (mark.lower() if traits.ignores_case else mark) in searched
        ]
        present = [
            word
            for word in traits.present
            if (word.lower() if traits.ignores_case else word) in searched
        ]
        return "".join([*self._pieces(text, has), *present])

    def _pieces(self, text: str, marks: list[str]) -> list[str]:
        """Marks as they are, the first two and the last two of each, and the text between them."""
        found = []
        if marks:
            found = [*re.finditer("|".join(map(re.escape, marks)), text, self._flags)]
        places = dict[str, list[int]]()
        for number, match in enumerate(found):
            places.setdefault(match[0], []).append(number)
        kept = {number for numbers in places.values() for number in numbers[:2] + numbers[-2:]}
        pieces = []
        end = 0
        for number, match in enumerate(found):
            if number in kept:
                pieces += [_shortened(text[end : match.start()]), match[0]]
                end = match.end()
        return [*pieces, _shortened(text[end:])]


def messages_of(outlines: Sequence[bytes]) -> list[Message]:
    """Messages with these outlines, no two of whose texts and ids are the same."""
    turns = itertools.count()
    turn = next(turns)
    messages = []
    for place, outline in enumerate(outlines):
        if _ASSISTANT in outline:
            turn = next(turns)
        messages.append(orjson.loads(_filled(outline.decode(), place, turn)))
    return messages


def _filled(outline: str, place: int, turn: int) -> str:
    texts = itertools.count()

    def id_of(match: re.Match[str]) -> str:
        length = len(match[0])
        number = turn * _MOST_IDS + ord(match[0][0]) - _FIRST_ID
        return f"{number:0{length}d}"[-length:]

    outline = _IDS.sub(id_of, outline)
    return re.sub(_TEXT, lambda _: f"x{place}y{next(texts)}z", outline)


def _shortened(text: str) -> str:
    """A text without marks: its white space at both ends, and one character for the rest."""
    before = _SPACE.match(text)
    assert before is not None, "it matches no characters, too"
    if before.end() == len(text):
        return _spaces(text)
    return f"{_spaces(before[0])}{_TEXT}{_spaces(text[len(text.rstrip()) :])}"


def _spaces(text: str) -> str:
    return text if len(text) < 3 else text[0] + text[-1]
