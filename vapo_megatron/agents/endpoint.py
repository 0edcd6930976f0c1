"""An OpenAI-compatible endpoint on rank 0: one secret path per episode, and every token recorded as sampled."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import httpx
import orjson
from aiohttp import web

from vapo_megatron.agents.recording import Message, Recording, Segment, comparable, text_after_answer
from vapo_megatron.config.rollout import EpisodeConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.request import GroupRequest, empty_response, response_seed
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.loop_thread import LoopThread

_ADDRESS = "127.0.0.1"
_LARGEST_REQUEST = 64 << 20
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class Episode:
    """One run of an agent.

    Attributes:
        request: of each turn, except its prompt and seed.
        seed: that of a response without an agent, and of the first turn.
        recording: of the conversation so far.
        limit: the limit that ended it ("turns", "tokens").
        fault: why it must not be trained on, such as "template".
        failure: an error of the engines, which ends the run.
        turns: figures of each turn; answered: time of the last answer.
    """

    request: GroupRequest
    seed: int
    recording: Recording = field(default_factory=Recording)
    limit: str = ""
    fault: str = ""
    engine: str = ""
    failure: VapoError | None = None
    turns: list[dict[str, float]] = field(default_factory=list)
    answered: float = 0.0
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def end_tool(self, now: float) -> None:
        """Count the seconds since the last answer as tool time of that turn."""
        if self.turns:
            self.turns[-1]["tool_seconds"] = now - self.answered


class _Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Endpoint:
    """Serves chat completions to agents. Its coroutines belong to the dispatcher's loop."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: TextTokenizer, limits: EpisodeConfig) -> None:
        self._dispatcher, self._tokenizer, self._limits = dispatcher, tokenizer, limits
        self._episodes: dict[str, Episode] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0

    async def open(self, episode: Episode) -> str:
        """Base URL of an episode, until close()."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        secret = secrets.token_urlsafe(24)
        self._episodes[secret] = episode
        return f"{self.address}/{secret}/v1"

    @property
    def address(self) -> str:
        """The address it listens at, once an episode is open."""
        return f"http://{_ADDRESS}:{self._port}"

    def close(self, base_url: str) -> None:
        """Refuse further requests of an episode."""
        self._episodes.pop(base_url.split("/")[-2]).closed = True

    async def stop(self) -> None:
        """End the server."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_post("/{secret}/v1/chat/completions", self._serve)
        # What is still asked for is of episodes that ended: nobody waits for its answer.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)  # 0 is forever
        await runner.setup()
        site = web.TCPSite(runner, _ADDRESS, 0)
        await site.start()
        self._runner, self._port = runner, runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.Response:
        status, kind, content = await self.answer(request.path, await request.read())
        return web.Response(status=status, body=content, content_type=kind)

    async def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and content of the answer to a request."""
        episode = self._episodes.get(path.removeprefix("/").removesuffix("/v1/chat/completions"))
        if episode is None:
            return _error("no such episode", "not_found", 404)
        try:
            asked = orjson.loads(body)
            messages, tools = _checked(asked)
            async with episode.lock:  # one turn at a time: the next may continue this one
                if episode.closed:
                    raise _Refused("the episode has ended", "not_found", 404)
                answer = await self._turn(episode, messages, tools, asked)
        except _Refused as error:
            return _error(str(error), error.code, error.status)
        except VapoError as error:
            episode.failure = error
            return _error(str(error), "engine", HTTPStatus.SERVICE_UNAVAILABLE)
        except (ValueError, TypeError) as error:
            return _error(f"no valid request: {error}", "invalid_request")
        if asked.get("stream"):
            return HTTPStatus.OK, "text/event-stream", _as_stream(answer)
        return HTTPStatus.OK, "application/json", orjson.dumps(answer)

    async def _turn(
        self, episode: Episode, messages: list[Message], tools: list[Message] | None, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Let the policy write one response and record it."""
        recording = episode.recording
        episode.end_tool(time.monotonic())
        if recording.turns >= self._limits.max_turns:
            episode.limit = episode.limit or "turns"
            raise _Refused(f"rollout.episode.max_turns={self._limits.max_turns} are taken", "limit")
        compared = comparable(messages)
        segment = recording.segment_of(compared, tools or [])
        observed: list[int] = []
        try:
            if segment is None:
                prompt = self._tokenizer.encode_messages(messages, tools)
                segment = Segment([], tools or [], prompt)
                is_new = True
            else:
                is_new, observed = False, self._observation(segment, messages[len(segment.messages) :], tools)
        except ValueError as error:
            episode.fault = "template"
            raise _Refused(f"the chat template cannot be applied: {error}", "template") from None
        context = [*segment.prompt_ids, *segment.token_ids, *observed]
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or episode.request.max_new_tokens
        # All that models are to read of the episode; a segment that is new is not among the recorded ones yet.
        total = recording.tokens + (len(context) if is_new else len(observed))
        room = min(int(max_tokens), episode.request.max_new_tokens, self._limits.max_tokens - total)
        if room < 1:
            episode.limit = episode.limit or "tokens"
            limit = f"This model's maximum context length is {self._limits.max_tokens} tokens"
            raise _Refused(f"{limit} (rollout.episode.max_tokens), the episode has {total}", "context_length_exceeded")
        asked = time.monotonic()
        turn = await self._generate(episode, context, room)
        try:
            content, calls = await self._parsed(turn, tools)
        except TryAgain as error:  # the engine was lost after its response: others go on
            episode.fault = "stopped"
            raise _Refused(str(error), "stopped", HTTPStatus.SERVICE_UNAVAILABLE) from None
        segment.observe(observed)
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        segment.write(turn, recording.turns, [*compared, *comparable([message])])
        if is_new:
            recording.segments.append(segment)
        episode.answered = time.monotonic()
        figures = {"tokens_written": len(turn.response_ids), "tokens_observed": len(observed)}
        episode.turns.append(figures | {"engine_seconds": episode.answered - asked, "tool_seconds": 0.0})
        reason = "length" if turn.truncated else "tool_calls" if calls else "stop"
        return _completion(f"chatcmpl-{turn.seed:x}", message, reason, len(context), len(turn.response_ids))

    def _observation(self, segment: Segment, new: list[Message], tools: list[Message] | None) -> list[int]:
        """Tokens of the messages after the policy's last answer, without its end token if it drew one."""
        text = text_after_answer(lambda messages: self._tokenizer.messages_text(messages, tools), new)
        last = segment.turns[-1]
        if not last.truncated:
            drawn = self._tokenizer.decode_all(last.response_ids[-1:].tolist())
            text = text.lstrip().removeprefix(drawn) if text.lstrip().startswith(drawn) else text
        return self._tokenizer.encode_response(text)

    async def _generate(self, episode: Episode, context: list[int], room: int) -> Sample:
        number, request = episode.recording.turns, episode.request
        seed = episode.seed if number == 0 else response_seed(episode.seed, request.prompt.cursor, number)
        prompt = replace(request.prompt, token_ids=tuple(context))
        empty = replace(empty_response(request, 0), prompt=prompt, seed=seed)
        turn_request = replace(
            request, prompt=prompt, samples=1, max_new_tokens=room, begun=(empty,), engine=episode.engine
        )
        (turn,) = await self._dispatcher.generate(turn_request)
        episode.engine = turn.engine
        if turn.goes_on or not len(turn.response_ids):
            episode.fault = "stopped"
            raise _Refused("the engines were stopped", "stopped", HTTPStatus.SERVICE_UNAVAILABLE)
        return turn

    async def _parsed(self, turn: Sample, tools: list[Message] | None) -> tuple[str, list[Message]]:
        """The text of a response and its tool calls, as SGLang's parser in the engine's process reads them."""
        ids = turn.response_ids.tolist()
        if not tools or self._limits.tool_parser is None:
            return self._tokenizer.decode(ids), []
        text = self._tokenizer.decode_all(ids if turn.truncated else ids[:-1])
        text, calls = await self._dispatcher.parse_tool_calls(turn.engine, text, tools, self._limits.tool_parser)
        return text, [
            {
                "id": f"call_{turn.seed:x}_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["parameters"]},
            }
            for number, call in enumerate(calls)
        ]


def _checked(body: Any) -> tuple[list[Message], list[Message] | None]:
    """Messages and tools of a request."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise _Refused("expected an object with messages", "invalid_request")
    for message in body["messages"]:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise _Refused(f"expected messages with a role of {', '.join(_ROLES)}", "invalid_request")
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts):
            raise _Refused("expected content as text or as parts with text", "invalid_request")
        for call in message.get("tool_calls") or []:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
                raise _Refused("expected tool_calls with function.name and function.arguments", "invalid_request")
    if body.get("n") not in (None, 1):
        raise _Refused("n: one response a request; its other branches would not be recorded", "invalid_request")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise _Refused("expected tools as a list", "invalid_request")
    return body["messages"], tools


def _completion(name: str, message: Message, reason: str, prompt: int, written: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }


def _error(message: str, code: str, status: int = 400) -> tuple[int, str, bytes]:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return status, "application/json", orjson.dumps({"error": error})


def _as_stream(answer: dict[str, Any]) -> bytes:
    """The whole answer as one chunk, for agents that stream."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        orjson.dumps(common | {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]})
        for part, reason in ((delta, None), ({}, choice["finish_reason"]))
    ]
    return b"".join(b"data: %b\n\n" % chunk for chunk in (*chunks, b"[DONE]"))


class DirectTransport(httpx.AsyncBaseTransport):
    """For an httpx client of this process, on any loop: requests reach the endpoint without a socket."""

    def __init__(self, endpoint: Endpoint, loop: LoopThread) -> None:
        self._endpoint, self._loop = endpoint, loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx. A caller that is cancelled, or that waits for longer than its timeout, cancels its turn."""
        work = self._loop.start(self._endpoint.answer(request.url.path, await request.aread()))
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            status, kind, content = await asyncio.wait_for(asyncio.wrap_future(work), seconds)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s", request=request) from None
        return httpx.Response(status, headers={"Content-Type": kind}, content=content)
