"""OpenAI's chat completions: what a request may ask for, and the form of answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from vapo_megatron.agents.recording import Compared, Message, as_templates_read, comparable

EVENT_STREAM = "text/event-stream"
# Status, content type, content.
Answer = tuple[int, str, bytes]
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of a request that change nothing here, whatever their value: sampling is the run's.
_WITHOUT_EFFECT = {
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "temperature",
    "top_p",
    "user",
}
_READ = {
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "stream",
    "stream_options",
    "tools",
}
# Fields that would change the response, with the values that ask for nothing.
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Read:
    """A message of a request.

    Attributes:
        sent: as it was sent.
        message: as templates read it.
        compared: what identifies it.
        is_of_texts: whether equal messages are the same: 1 == True in Python.
    """

    sent: Any
    message: Message
    compared: Compared
    is_of_texts: bool


def read_request(body: Any, before: Sequence[Read] = ()) -> tuple[list[Read], list[Message] | None]:
    """Messages and tools of a request. Raises Refused for what cannot be honoured.

    before: messages of another request, taken over up to the first that is not sent again.
    """
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("messages"), list)
        or not body["messages"]
    ):
        raise Refused("expected an object with messages", "invalid_request")
    read = []
    for place, sent in enumerate(body["messages"]):
        if place < len(before) and before[place].is_of_texts and before[place].sent == sent:
            read.append(before[place])
        else:
            read.append(_read(sent))
    _check_options(body)
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Refused("expected tools as a list", "invalid_request")
    return read, tools


def _read(sent: Any) -> Read:
    _check_message(sent)
    message = as_templates_read(sent)
    (compared,) = comparable([message])
    return Read(sent, message, compared, _is_of_texts(sent))


def _is_of_texts(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_of_texts, value.values()))
    if isinstance(value, list):
        return all(map(_is_of_texts, value))
    return value is None or isinstance(value, str)


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(f"expected messages with a role of {', '.join(_ROLES)}", "invalid_request")
    content = message.get("content") or ""
    if not isinstance(content, list):
        content = [{"text": content}]
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
            raise Refused("expected content as text or as parts with text", "invalid_request")
        if part.get("type", "text") != "text" or "text" not in part:
            raise Refused(
                f"a part of the type {part.get('type')!r}: only text reaches the policy",
                "unsupported_parameter",
            )
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise Refused(
                "expected tool_calls with function.name and function.arguments", "invalid_request"
            )


def _check_options(body: dict[str, Any]) -> None:
    for name in sorted(body.keys() - _READ - _WITHOUT_EFFECT):
        if body[name] is None or body[name] in _ASKS_FOR_NOTHING.get(name, ()):
            continue
        raise Refused(
            f"{name}={str(body[name])[:60]!r} is not supported: leave it out",
            "unsupported_parameter",
        )
    if body.get("n") not in (None, 1):
        raise Refused(
            "n: one response a request; its other branches would not be recorded", "invalid_request"
        )
    for name in ("max_completion_tokens", "max_tokens"):
        most = body.get(name)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise Refused(f"{name}={most!r}: expected a positive integer", "invalid_request")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise Refused("expected stream_options as an object", "invalid_request")


def completion(
    name: str, message: Message, reason: str, prompt: int, written: int
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        },
    }


def error_answer(message: str, code: str, status: int = 400) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return status, "application/json", orjson.dumps({"error": error})


def asks_for_stream(body: bytes) -> bool:
    """Whether a request, valid or not, asks for a stream."""
    try:
        return bool(orjson.loads(body).get("stream"))
    except (ValueError, AttributeError):
        return False


def as_stream(answer: dict[str, Any], with_usage: bool) -> bytes:
    """The whole answer as one chunk, for agents that stream."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": number, **call} for number, call in enumerate(delta["tool_calls"])
        ]
    common = {name: answer[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    parts: tuple[tuple[dict[str, Any], str | None], ...] = (
        (delta, None),
        ({}, choice["finish_reason"]),
    )
    chunks = [
        {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        for part, reason in parts
    ]
    chunks += [{"choices": [], "usage": answer["usage"]}] if with_usage else []
    return (
        b"".join(b"data: %b\n\n" % orjson.dumps(common | chunk) for chunk in chunks)
        + b"data: [DONE]\n\n"
    )
