"""Conversations in rows of data: OpenAI's messages, and ShareGPT's."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, str]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}


def messages_of(value: Any) -> tuple[Message, ...] | None:
    """The messages {role, content} of a field; None if it holds none.

    Raises:
        ValueError: they have another role, or content that is no text.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if not all(_is_message(entry) for entry in value):
        return None
    return tuple(_message(entry) for entry in value)


def _is_message(entry: Any) -> bool:
    return isinstance(entry, Mapping) and ("role" in entry or "from" in entry)


def _message(entry: Mapping[str, Any]) -> Message:
    named = entry.get("role", entry.get("from"))
    role = _ROLES.get(str(named))
    if role is None:
        raise ValueError(f"a message of the role {named!r}; expected system, user or assistant")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise ValueError("a message with a part that is no text, which the policy cannot read")
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message whose content is {type(content).__name__}; expected a text")
    return {"role": role, "content": content}


def problem_of(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """The last user message, and the messages before it.

    Raises:
        ValueError: no message is the user's.
    """
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            return messages[place]["content"], tuple(messages[:place])
    raise ValueError("messages without one of the role user")


def answer_of(messages: Sequence[Message]) -> str:
    """The last message, which is the assistant's.

    Raises:
        ValueError: it is not.
    """
    if messages[-1]["role"] != "assistant":
        raise ValueError("messages whose last is not the assistant's")
    return messages[-1]["content"]
