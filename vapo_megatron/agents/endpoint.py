"""An OpenAI-compatible endpoint on rank 0: one secret path per episode, and every token recorded as
sampled."""

import asyncio
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import httpx
import orjson
from aiohttp import web

from vapo_megatron.agents.recording import (
    Message,
    Recording,
    Segment,
    as_templates_read,
    comparable,
    text_after_answer,
)
from vapo_megatron.config.rollout import EpisodeConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest, empty_response, response_seed

_ADDRESS = "127.0.0.1"
_LARGEST_REQUEST = 64 << 20
_MOST_READ = 4 * _LARGEST_REQUEST  # bytes of all requests that are being read or answered at once
_MOST_CHARACTERS_ON_LOOP = 20_000  # of a request; tokenising these takes some 20 ms
_EVENTS = "text/event-stream"
NOT_REPEATED = "not_repeated"  # fault of an episode that takes another way than the one it repeats
KEEP_ALIVE_S = 5.0  # a stream that has nothing to say yet sends a comment this often
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


@dataclass
class Episode:
    """One run of an agent.

    Attributes:
        request: of each turn, except its prompt and seed.
        seed: a response without an agent would have it; also the first turn's.
        recording: the conversation up to now.
        repeats: turns that are answered as they were recorded; an unfinished one (finish_reason
            abort) is sampled again.
        pauses_at: number of turns after which it is continued in a later step; None: it is played
            to its end.
        is_paused: whether that has come. work: the agent's, which ends then.
        limit: the limit that ended it ("turns", "tokens").
        fault: why it must not be trained on, such as "template".
        failure: an error of the engines, which ends the run.
        turns: figures of each turn; answered: time of the last answer.
        deadline, ends_at: when the call under way must have ended, and when the episode must (time
            of the loop).
    """

    request: GroupRequest
    seed: int
    recording: Recording = field(default_factory=Recording)
    repeats: Sequence[Sample] = ()
    pauses_at: int | None = None
    is_paused: bool = False
    work: asyncio.Future[Any] | None = None
    limit: str = ""
    fault: str = ""
    engine: str = ""
    failure: VapoError | None = None
    turns: list[dict[str, float]] = field(default_factory=list)
    answered: float = 0.0
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    ends_at: float = math.inf
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def end_tool(self, now: float) -> None:
        """Count the seconds since the last answer as tool time of that turn."""
        if self.turns:
            self.turns[-1]["tool_seconds"] = now - self.answered

    def begin_call(self, seconds: float | None) -> None:
        """Limit what comes next, a response or the agent's work until its next request, to these
        seconds."""
        if seconds is not None:
            self._reschedule(min(self.ends_at, asyncio.get_running_loop().time() + seconds))

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Stop the clocks of the episode and of its call while no engine has room for them, or none
        serves."""
        loop = asyncio.get_running_loop()
        call_ends_at = self.deadline.when()
        start = loop.time()
        self._reschedule(None)
        try:
            yield
        finally:
            waited = loop.time() - start
            self.ends_at += waited
            self._reschedule(self.ends_at if call_ends_at is None else call_ends_at + waited)

    def _reschedule(self, ends_at: float | None) -> None:
        if not self.closed and not self.deadline.expired():
            self.deadline.reschedule(ends_at)


class _Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Endpoint:
    """Serves chat completions to agents. Its coroutines belong to the dispatcher's loop."""

    def __init__(
        self, dispatcher: Dispatcher, tokenizer: TextTokenizer, limits: EpisodeConfig
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._limits = limits
        self._episodes: dict[str, Episode] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._port = 0
        self._bytes_read = 0
        # A text with more characters than this cannot fit the context, whatever it says.
        self._most_characters = limits.max_tokens * tokenizer.longest_token

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
        # Requests still running belong to episodes that ended: nobody waits for the answers.
        # 0 is forever. A client that goes away cancels its request.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        site = web.TCPSite(runner, _ADDRESS, 0)
        await site.start()
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        # Before anything is read for it: whoever does not know a secret gets no memory.
        if request.match_info["secret"] not in self._episodes:
            return _response(_error("no such episode", "not_found", 404))
        size = request.content_length
        if size is None:
            size = _LARGEST_REQUEST
        if self._bytes_read + size > _MOST_READ:
            return _response(_error("too many requests at once", "busy", 503))
        self._bytes_read += size
        try:
            return await self._answer_over_http(request, await request.read())
        finally:
            self._bytes_read -= size

    async def _answer_over_http(self, request: web.Request, body: bytes) -> web.StreamResponse:
        stream = None
        answer = asyncio.ensure_future(self.answer(request.path, body))
        try:
            while not (await asyncio.wait([answer], timeout=KEEP_ALIVE_S))[0]:
                if stream is None and _streams(body):
                    stream = web.StreamResponse(headers={"Content-Type": _EVENTS})
                    await stream.prepare(request)
                if stream is not None:
                    await stream.write(b": waiting\n\n")
        finally:
            answer.cancel()
        _, kind, content = answer.result()
        if stream is None:
            return _response(answer.result())
        await stream.write(content if kind == _EVENTS else b"data: %b\n\n" % content)
        await stream.write_eof()
        return stream

    async def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and content of the answer to a request."""
        episode = self._episodes.get(path.removeprefix("/").removesuffix("/v1/chat/completions"))
        if episode is None:
            return _error("no such episode", "not_found", 404)
        try:
            asked = orjson.loads(body)
            messages, tools = _checked(asked)
            self._refuse_too_long(messages, tools)
            async with episode.lock:  # one turn at a time: the next may continue this one
                if episode.closed:
                    raise _Refused("the episode has ended", "not_found", 404)
                try:
                    answer = await self._turn(episode, messages, tools, asked)
                finally:  # a request that its agent gave up ends here, too
                    episode.begin_call(self._limits.call_timeout_s)
        except _Refused as error:
            return _error(str(error), error.code, error.status)
        except VapoError as error:
            episode.failure = error
            return _error(str(error), "engine", HTTPStatus.SERVICE_UNAVAILABLE)
        except (ValueError, TypeError) as error:
            return _error(f"no valid request: {error}", "invalid_request")
        if asked.get("stream"):
            with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
            return HTTPStatus.OK, _EVENTS, _as_stream(answer, with_usage)
        return HTTPStatus.OK, "application/json", orjson.dumps(answer)

    def _refuse_too_long(self, messages: list[Message], tools: list[Message] | None) -> None:
        """Raises _Refused for what cannot fit the context; tokenising it would hold up the loop
        that carries all engines' traffic."""
        characters = sum(len(message["content"]) for message in messages)
        characters += len(orjson.dumps(tools or []))
        if characters > self._most_characters:
            raise _Refused(
                f"This model's maximum context length is {self._limits.max_tokens} tokens "
                f"(rollout.episode.max_tokens), the request has {characters} characters",
                "context_length_exceeded",
            )

    async def _turn(
        self,
        episode: Episode,
        messages: list[Message],
        tools: list[Message] | None,
        body: dict[str, Any],
    ) -> dict[str, Any]:
        """Let the policy write one response and record it."""
        recording = episode.recording
        episode.end_tool(time.monotonic())
        episode.begin_call(self._limits.call_timeout_s)
        if recording.turns >= self._limits.max_turns:
            episode.limit = episode.limit or "turns"
            raise _Refused(f"rollout.episode.max_turns={self._limits.max_turns} are taken", "limit")
        try:
            segment, observed, shown = await self._segment_of(recording, messages, tools or [])
        except ValueError as error:
            episode.fault = "template"
            raise _Refused(f"the chat template cannot be applied: {error}", "template") from None
        is_new = not segment.turns
        context = [*segment.prompt_ids, *segment.token_ids, *observed]
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if max_tokens is None:
            max_tokens = episode.request.max_new_tokens
        # All that models are to read of the episode; a segment that is new is not among the
        # recorded ones yet.
        total = recording.tokens + (len(context) if is_new else len(observed))
        room = min(max_tokens, episode.request.max_new_tokens, self._limits.max_tokens - total)
        if room < 1:
            episode.limit = episode.limit or "tokens"
            limit = f"This model's maximum context length is {self._limits.max_tokens} tokens"
            raise _Refused(
                f"{limit} (rollout.episode.max_tokens), the episode has {total}",
                "context_length_exceeded",
            )
        if recording.turns == episode.pauses_at:
            episode.is_paused = episode.work is not None and episode.work.cancel()
            raise _Refused(
                "the episode continues in a later step", "paused", HTTPStatus.SERVICE_UNAVAILABLE
            )
        asked = time.monotonic()
        turn = await self._generate(episode, context, room, segment.read)
        try:
            content, calls = await self._parsed(turn, tools)
        except TryAgain as error:  # the engine was lost after its response; other episodes continue
            episode.fault = "stopped"
            raise _Refused(str(error), "stopped", HTTPStatus.SERVICE_UNAVAILABLE) from None
        segment.observe(observed)
        message: Message = {"role": "assistant", "content": content} | (
            {"tool_calls": calls} if calls else {}
        )
        segment.write(
            turn, recording.turns, comparable([*messages, as_templates_read(message)]), shown
        )
        if is_new:
            recording.segments.append(segment)
        episode.answered = time.monotonic()
        figures = {"tokens_written": len(turn.response_ids), "tokens_observed": len(observed)}
        episode.turns.append(
            figures | {"engine_seconds": episode.answered - asked, "tool_seconds": 0.0}
        )
        reason = "length" if turn.truncated else "tool_calls" if calls else "stop"
        return _completion(
            f"chatcmpl-{turn.seed:x}", message, reason, len(context), len(turn.response_ids)
        )

    async def _segment_of(
        self, recording: Recording, messages: list[Message], tools: list[Message]
    ) -> tuple[Segment, list[int], str]:
        """_segment(), in a thread where it takes long: the loop carries all engines' traffic, and
        tokenizers release the interpreter's lock."""
        characters = sum(len(message["content"]) for message in messages)
        if characters < _MOST_CHARACTERS_ON_LOOP:
            return self._segment(recording, messages, tools)
        return await asyncio.to_thread(self._segment, recording, messages, tools)

    def _segment(
        self, recording: Recording, messages: list[Message], tools: list[Message]
    ) -> tuple[Segment, list[int], str]:
        """The segment that a request continues, and the tokens of its messages after the policy's
        last answer; or a new segment, which has no turns yet. Last, the request as the chat
        template writes it; empty if it cannot, which only a new segment needs."""
        segment = recording.segment_of(comparable(messages), tools)
        shown = ""
        try:
            shown = self._text(messages, tools)
        except ValueError:  # what a segment has is not rendered again
            if segment is None:
                raise
        if segment is not None:
            new = messages[len(segment.messages) :]
            after = text_after_answer(lambda given: self._text(given, tools), new)
            if segment.is_kept_in(shown, after):
                return segment, self._observation(segment.turns[-1], after), shown
        prompt = self._tokenizer.encode_response(shown)
        return Segment([], tools, prompt, by_template=segment is not None), [], shown

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

    def _observation(self, last: Sample, text: str) -> list[int]:
        """Tokens of the text after the policy's last answer, without its end token if it drew
        one."""
        if not last.truncated:
            drawn = self._tokenizer.decode_all(last.response_ids[-1:].tolist())
            text = text.lstrip().removeprefix(drawn) if text.lstrip().startswith(drawn) else text
        return self._tokenizer.encode_response(text)

    async def _generate(self, episode: Episode, context: list[int], room: int, read: int) -> Sample:
        number = episode.recording.turns
        request = episode.request
        seed = (
            episode.seed
            if number == 0
            else response_seed(episode.seed, request.prompt.cursor, number)
        )
        if number < len(episode.repeats):
            recorded = episode.repeats[number]
            if recorded.prompt.token_ids != tuple(context):
                episode.fault = NOT_REPEATED
                raise _Refused(
                    "the episode is repeated, and this is another request than before", NOT_REPEATED
                )
            if not recorded.goes_on:
                return replace(recorded, seed=seed)
        prompt = replace(request.prompt, token_ids=tuple(context))
        empty = replace(empty_response(request, 0), prompt=prompt, seed=seed)
        experts = request.routed_experts and replace(request.routed_experts, start=read)
        turn_request = replace(
            request, prompt=prompt, samples=1, max_new_tokens=room, begun=(empty,), window=None
        )
        turn_request = replace(turn_request, engine=episode.engine, routed_experts=experts)
        (turn,) = await self._dispatcher.generate(turn_request, episode.waits)
        episode.engine = turn.engine
        if turn.goes_on or not len(turn.response_ids):
            episode.fault = "stopped"
            raise _Refused("the engines were stopped", "stopped", HTTPStatus.SERVICE_UNAVAILABLE)
        return turn

    async def _parsed(self, turn: Sample, tools: list[Message] | None) -> tuple[str, list[Message]]:
        """The text of a response and its tool calls, as SGLang's parser in the engine's process
        reads them."""
        ids = turn.response_ids.tolist()
        if not tools or self._limits.tool_parser is None:
            return self._tokenizer.decode(ids), []
        written = self._tokenizer.decode_all(ids if turn.truncated else ids[:-1])
        text, calls = await self._dispatcher.parse_tool_calls(
            turn.engine, written, tools, self._limits.tool_parser
        )
        # The parser drops calls of unknown tools and broken JSON; the agent sees them
        if not calls:
            return written, []
        functions = [{"name": call["name"], "arguments": call["parameters"]} for call in calls]
        # Mistral's templates raise on ids that are not of nine letters and digits.
        names = [f"{response_seed(turn.seed, 0, number):09x}"[-9:] for number in range(len(calls))]
        return text, [
            {"id": name, "type": "function", "function": f}
            for name, f in zip(names, functions, strict=True)
        ]


def _checked(body: Any) -> tuple[list[Message], list[Message] | None]:
    """Messages and tools of a request. Raises _Refused for what cannot be honoured."""
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("messages"), list)
        or not body["messages"]
    ):
        raise _Refused("expected an object with messages", "invalid_request")
    for message in body["messages"]:
        _check_message(message)
    _check_options(body)
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise _Refused("expected tools as a list", "invalid_request")
    return [as_templates_read(message) for message in body["messages"]], tools


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _Refused(f"expected messages with a role of {', '.join(_ROLES)}", "invalid_request")
    content = message.get("content") or ""
    if not isinstance(content, list):
        content = [{"text": content}]
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
            raise _Refused("expected content as text or as parts with text", "invalid_request")
        if part.get("type", "text") != "text" or "text" not in part:
            raise _Refused(
                f"a part of the type {part.get('type')!r}: only text reaches the policy",
                "unsupported_parameter",
            )
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise _Refused(
                "expected tool_calls with function.name and function.arguments", "invalid_request"
            )


def _check_options(body: dict[str, Any]) -> None:
    for name in sorted(body.keys() - _READ - _WITHOUT_EFFECT):
        if body[name] is None or body[name] in _ASKS_FOR_NOTHING.get(name, ()):
            continue
        raise _Refused(
            f"{name}={str(body[name])[:60]!r} is not supported: leave it out",
            "unsupported_parameter",
        )
    if body.get("n") not in (None, 1):
        raise _Refused(
            "n: one response a request; its other branches would not be recorded", "invalid_request"
        )
    for name in ("max_completion_tokens", "max_tokens"):
        most = body.get(name)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise _Refused(f"{name}={most!r}: expected a positive integer", "invalid_request")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise _Refused("expected stream_options as an object", "invalid_request")


def _response(answer: tuple[int, str, bytes]) -> web.Response:
    status, kind, content = answer
    return web.Response(status=status, body=content, content_type=kind)


def _completion(
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


def _error(message: str, code: str, status: int = 400) -> tuple[int, str, bytes]:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return status, "application/json", orjson.dumps({"error": error})


def _streams(body: bytes) -> bool:
    """Whether a request, valid or not, asks for a stream."""
    try:
        return bool(orjson.loads(body).get("stream"))
    except (ValueError, AttributeError):
        return False


def _as_stream(answer: dict[str, Any], with_usage: bool) -> bytes:
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


class DirectTransport(httpx.AsyncBaseTransport):
    """For an httpx client of this process, on any loop: requests reach the endpoint without a
    socket."""

    def __init__(self, endpoint: Endpoint, loop: LoopThread) -> None:
        self._endpoint = endpoint
        self._loop = loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx. A caller that is cancelled, or that waits for longer than its timeout,
        cancels its turn."""
        body = await request.aread()
        seconds = request.extensions.get("timeout", {}).get("read")
        work = self._loop.start(self._endpoint.answer(request.url.path, body))
        if seconds is not None and seconds > KEEP_ALIVE_S and _streams(body):
            seconds = None  # a socket would bring a sign of life before
        try:
            status, kind, content = await asyncio.wait_for(asyncio.wrap_future(work), seconds)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s", request=request) from None
        return httpx.Response(status, headers={"Content-Type": kind}, content=content)
