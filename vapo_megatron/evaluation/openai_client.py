"""Responses from an OpenAI-compatible server (/chat/completions or /completions)."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from openai import AsyncOpenAI, BaseModel, OpenAIError
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion

from vapo_megatron.config.data import PromptTemplate, ServerConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.evaluation.responses import Response
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rewards.openai_server import (
    answered,
    connect,
    one_line,
    reason_of_failure,
    text_of,
)
from vapo_megatron.rollout.request import response_seed

_logger = logging.getLogger(__name__)

_WHOLE = frozenset({"stop", "length", "tool_calls", "content_filter"})
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_WARN_SECONDS = 60.0
_SILENT_SECONDS = 30.0
_SEED_BITS = 0x7FFF_FFFF  # what every server takes


class OpenAIClient:
    """Requests k responses to each prompt, each with its own seed, many at once. The server applies
    chat templates."""

    def __init__(
        self, config: ServerConfig, template: PromptTemplate, sampling: SamplingConfig, seed: int
    ) -> None:
        self._config = config
        self._template = template
        self._sampling = sampling
        self._seed = seed
        self._key = config.api_key()
        self._path = "/chat/completions" if config.api == "chat" else "/completions"
        self._url = config.url.rstrip("/") + self._path
        self._next_warning = 0.0

    def generate(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        on_done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """k responses to each prompt; on_group gets all responses of a prompt at once, on_done is
        called for each response.

        Raises:
            RunFailed: the server refuses a request or sends something other than a completion.
            TryAgain: it is unreachable or too busy for longer than server.retry_timeout_s.
        """
        # Not in this thread: SIGTERM's SystemExit would come up in one of a thousand tasks, and
        # asyncio would print the stack of each.
        loop = LoopThread()
        try:
            loop.run(self._generate(prompts, k, on_group, on_done))
        finally:
            loop.close()

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        on_done: Callable[[int], None],
    ) -> None:
        free = asyncio.Semaphore(self._config.concurrency)
        no_response = f"no response within {_SILENT_SECONDS:g} s"
        silence = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._warn, no_response)
        async with connect(self._config.url, self._key, self._config.request_timeout_s) as client:

            async def one(prompt: Prompt, index: int) -> Response:
                async with free:
                    response = await self._response(client, prompt, index)
                silence.cancel()
                on_done(1)
                return response

            async def group(prompt: Prompt) -> None:
                async with asyncio.TaskGroup() as tasks:
                    responses = [tasks.create_task(one(prompt, index)) for index in range(k)]
                on_group([task.result() for task in responses])

            try:
                async with asyncio.TaskGroup() as tasks:
                    for prompt in prompts:
                        tasks.create_task(group(prompt))
            except BaseExceptionGroup as errors:
                error: BaseException = errors
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                raise error from None

    async def _response(self, client: AsyncOpenAI, prompt: Prompt, index: int) -> Response:
        body = self._body(prompt, index)
        pause = _FIRST_PAUSE
        failing_since = None
        kind = ChatCompletion if self._config.api == "chat" else Completion
        while True:
            delay = 0.0
            asked = time.monotonic()
            try:
                request = client.post(self._path, cast_to=kind, body=body)
                answer: Any = await answered(self._config.request_timeout_s, request)
                response = self._read(answer, prompt, index)
                if response.finish_reason in _WHOLE:
                    return response
                reason = f"a response that was broken off ({response.finish_reason})"
            except OpenAIError as error:
                reason, passing, delay = reason_of_failure(error, self._config.request_timeout_s)
                if not passing:
                    raise RunFailed(
                        f"{self._url}: refused the request for problem {prompt.id} ({reason}): "
                        "check section server"
                    ) from None
            except (ValueError, RecursionError):  # sent as JSON, and is none
                raise self._no_completion("invalid JSON", prompt) from None
            self._warn(reason)
            if failing_since is None:
                failing_since = asked
            pause = max(pause, delay)
            if time.monotonic() + pause - failing_since > self._config.retry_timeout_s:
                raise TryAgain(
                    f"{self._url}: problem {prompt.id} was not answered within "
                    f"server.retry_timeout_s={self._config.retry_timeout_s:g} s, the last try: "
                    f"{reason}; earlier answers are kept, start again with run.resume=auto"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _warn(self, reason: str) -> None:
        """Say what keeps requests from being answered, at most once in _WARN_SECONDS."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARN_SECONDS
            advice = (
                "see the server's log, check server.url; trying again for server.retry_timeout_s"
            )
            _logger.warning(
                "%s: %s: %s=%g s", self._url, reason, advice, self._config.retry_timeout_s
            )

    def _body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._config.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": response_seed(self._seed, prompt.cursor, index) & _SEED_BITS,
            "n": 1,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop) or None,
        }
        if self._config.api == "chat":
            body["messages"] = self._template.messages(prompt.problem, prompt.before)
            if self._template.chat_template_kwargs:
                body["chat_template_kwargs"] = self._template.chat_template_kwargs
        elif prompt.before:
            raise BadInput(f"row {prompt.id} has messages before the problem: set server.api=chat")
        else:
            body["prompt"] = self._template.user_template.replace("{problem}", prompt.problem)
        return {
            key: value for key, value in (body | self._config.extra).items() if value is not None
        }

    def _read(self, answer: ChatCompletion | Completion, prompt: Prompt, index: int) -> Response:
        try:
            choice = answer.choices[0]
            if isinstance(choice, CompletionChoice):
                content = choice.text
            else:
                content = text_of(choice.message)
            tokens = int(answer.usage.completion_tokens)  # type: ignore[union-attr]
            reason = str(choice.finish_reason)
        except (
            AttributeError,
            IndexError,
            TypeError,
            ValueError,
        ):  # the library does not check what a server sends
            raise self._no_completion(repr(one_line(_raw(answer), 200)), prompt) from None
        # A lone surrogate cannot be written to a file.
        content = content.encode("utf-8", "replace").decode("utf-8")
        return Response(prompt.id, index, content, tokens, reason)

    def _no_completion(self, sent: str, prompt: Prompt) -> RunFailed:
        return RunFailed(
            f"{self._url}: answered problem {prompt.id} with {sent}, expected a completion with "
            "choices and usage: give the base address of an OpenAI-compatible server as server.url"
        )


def _raw(answer: Any) -> str:
    """The server's reply, as text."""
    if isinstance(answer, BaseModel):
        return str(answer.to_json(indent=None))
    return str(answer)
