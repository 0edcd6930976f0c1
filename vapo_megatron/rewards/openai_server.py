"""Shared by all clients of an OpenAI-compatible server: the connection, and how failures and
messages are read."""

from collections.abc import Awaitable
from typing import TypeVar

import httpx
from openai import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    Omit,
)
from openai.types.chat import ChatCompletionMessage

from vapo_megatron.deadlines import within

T = TypeVar("T")


def connect(url: str, key: str | None, timeout_s: float) -> AsyncOpenAI:
    """A client without retries, connection limit or proxy (http_proxy is ignored)."""
    return AsyncOpenAI(
        api_key=key or "none",  # never OPENAI_API_KEY, which is not meant for this server
        default_headers=None if key else {"Authorization": Omit()},  # type: ignore[dict-item]
        base_url=url,
        timeout=timeout_s,
        max_retries=0,
        http_client=DefaultAsyncHttpxClient(limits=httpx.Limits(), trust_env=False),
    )


async def answered(seconds: float, request: Awaitable[T]) -> T:
    """The answer to a request, of which the client limits each read alone.

    Raises:
        APITimeoutError: it was not there within `seconds`.
    """
    try:
        return await within(seconds, request)
    except TimeoutError:
        raise APITimeoutError(httpx.Request("POST", "")) from None


def reason_of_failure(error: Exception, timeout_s: float) -> tuple[str, bool, float]:
    """A failed request in a few words, whether another try may help, and the seconds that the
    server asks to wait."""
    if isinstance(error, APIStatusError):
        status = error.status_code
        wait = error.response.headers.get("Retry-After")
        # Too many requests, and a server that is starting, overloaded or behind a broken proxy.
        passing = status in (408, 409, 425, 429) or (status >= 500 and status != 501)
        # A date is left to the usual pauses
        seconds = float(wait) if wait is not None and wait.isdigit() else 0.0
        return f"HTTP {status}: {one_line(error.response.text, 300)}", passing, seconds
    if isinstance(error, APITimeoutError):
        return f"no answer within {timeout_s:g} s", True, 0.0
    if isinstance(error, APIConnectionError):
        return f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}", True, 0.0
    return f"{type(error).__name__}: {one_line(str(error), 200)}", False, 0.0


def text_of(message: ChatCompletionMessage) -> str:
    """The whole text; some servers part the thinking from the answer, which the verifier reads
    alone."""
    content = message.content or ""
    thinking = getattr(message, "reasoning_content", None)
    return f"<think>{thinking}</think>{content}" if thinking else content


def one_line(text: str, most: int) -> str:
    """The beginning of a text, on one line."""
    return " ".join(text.split())[:most]
