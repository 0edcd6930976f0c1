"""Responses from a server with the OpenAI API (/chat/completions or /completions)."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.config.server import ServerConfig
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.evaluation.responses import Response
from vapo_megatron.experience.sample import Prompt
from vapo_megatron.rollout.dispatcher import response_seed

_WHOLE = frozenset({"stop", "length", "tool_calls", "content_filter"})
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_SEED_BITS = 0x7FFF_FFFF  # what every server takes


class OpenAIClient:
    """Asks for k responses to each prompt, each with a seed of its own, many at once.

    Args:
        config: the server section.
        template: how a problem is put; chat_template is the server's business here.
        sampling: how responses are drawn.
        seed: of the run.
    """

    def __init__(self, config: ServerConfig, template: PromptTemplate, sampling: SamplingConfig, seed: int) -> None:
        self._config, self._template, self._sampling, self._seed = config, template, sampling, seed
        key = config.api_key()
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        path = "chat/completions" if config.api == "chat" else "completions"
        self._url = f"{config.url.rstrip('/')}/{path}"

    def collect(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """k responses to each prompt; on_group gets those of one prompt together, advance is called for each response.

        Raises:
            RunFailed: the server refuses a request or answers something else than a completion.
            TryAgain: it is not there or too busy for longer than server.retry_timeout_s.
        """
        asyncio.run(self._collect(prompts, k, on_group, advance))

    async def _collect(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        advance: Callable[[int], None],
    ) -> None:
        free = asyncio.Semaphore(self._config.concurrency)
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector) as session:

            async def one(prompt: Prompt, index: int) -> Response:
                async with free:
                    response = await self._response(session, prompt, index)
                advance(1)
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

    async def _response(self, session: aiohttp.ClientSession, prompt: Prompt, index: int) -> Response:
        body, pause, failing_since = self._body(prompt, index), _FIRST_PAUSE, None
        while True:
            wanted = 0.0
            asked = time.monotonic()
            try:
                async with session.post(self._url, json=body) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        response = self._read(text, prompt, index)
                        if response.finish_reason in _WHOLE:
                            return response
                        reason = f"a response that was broken off ({response.finish_reason})"
                    else:
                        reason = f"HTTP {answer.status}: {' '.join(text.split())[:300]}"
                        if not _passing(answer.status):
                            raise RunFailed(f"{self._url}: refused the request for problem {prompt.id} ({reason})")
                        wanted = _seconds(answer.headers.get("Retry-After"))
            except TimeoutError:
                reason = f"no answer within server.request_timeout_s={self._config.request_timeout_s:g} s"
            except aiohttp.ClientError as error:
                reason = f"{type(error).__name__}: {error}"
            failing_since = asked if failing_since is None else failing_since
            pause = max(pause, wanted)
            if time.monotonic() + pause - failing_since > self._config.retry_timeout_s:
                raise TryAgain(
                    f"{self._url}: problem {prompt.id} was not answered within server.retry_timeout_s="
                    f"{self._config.retry_timeout_s:g} s, the last try: {reason}; what is answered is kept, start "
                    "again with run.resume=auto"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        sampling, user = self._sampling, self._template.user_template.replace("{problem}", prompt.problem)
        body: dict[str, Any] = {
            "model": self._config.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": response_seed(self._seed, prompt.cursor, index) & _SEED_BITS,
            "n": 1,
        }
        if self._config.api == "chat":
            system = self._template.system_prompt
            before = [] if system is None else [{"role": "system", "content": system}]
            body["messages"] = [*before, {"role": "user", "content": user}]
        else:
            body["prompt"] = user
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k  # not OpenAI's own, but SGLang and vLLM take it
        return {key: value for key, value in (body | self._config.extra).items() if value is not None}

    def _read(self, text: str, prompt: Prompt, index: int) -> Response:
        try:
            answer = json.loads(text)
            choice = answer["choices"][0]
            said = choice["text"] if self._config.api == "completions" else _said(choice["message"])
            tokens, reason = int(answer["usage"]["completion_tokens"]), str(choice["finish_reason"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise RunFailed(
                f"{self._url}: answered problem {prompt.id} with {' '.join(text.split())[:200]!r}, expected a "
                "completion with choices and usage: give the base address of an OpenAI-compatible server as server.url"
            ) from None
        # A character that JSON spelled in halves and cut between them would fit into no file.
        said = said.encode("utf-8", "replace").decode("utf-8")
        return Response(prompt.id, index, said, tokens, reason)


def _passing(status: int) -> bool:
    """Worth another try: too many requests, and a server that is starting, overloaded or behind a broken proxy."""
    return status in (408, 409, 425, 429) or (status >= 500 and status != 501)


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for; a date is left to the usual pauses."""
    return float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0


def _said(message: dict[str, Any]) -> str:
    """The whole text; some servers part the thinking from the answer, which the verifier reads alone."""
    content, thinking = message.get("content") or "", message.get("reasoning_content")
    return f"<think>{thinking}</think>{content}" if thinking else content
