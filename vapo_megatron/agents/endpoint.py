"""An OpenAI-compatible endpoint on rank 0: one secret path per episode, and every token recorded as
sampled."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol

import orjson
from aiohttp import web

from vapo_megatron.agents.openai_format import (
    EVENT_STREAM,
    Answer,
    Read,
    Refused,
    as_stream,
    asks_for_stream,
    completion,
    error_answer,
    read_request,
)
from vapo_megatron.agents.recording import Message, Recording, as_templates_read, comparable
from vapo_megatron.agents.rendering import Prepared, Renderer
from vapo_megatron.config.rollout import EpisodeConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rollout.request import GroupRequest, empty_response, response_seed

_ADDRESS = "127.0.0.1"
_LARGEST_REQUEST = 64 << 20
_MOST_READ = 4 * _LARGEST_REQUEST  # bytes of all requests that are being read or answered at once
_MOST_CHARACTERS_ON_LOOP = 20_000  # of a request; tokenising these takes some 20 ms
NOT_REPEATED = "not_repeated"  # fault of an episode that takes another way than the one it repeats
KEEP_ALIVE_S = 5.0  # a stream that has nothing to say yet sends a comment this often

Waits = Callable[[], AbstractContextManager[None]]


class TurnWriter(Protocol):
    """The engines as agents need them: a Dispatcher, or what passes requests on to one."""

    loop: LoopThread

    async def generate(self, group: GroupRequest, waits: Waits = ...) -> list[Sample]: ...

    async def parse_tool_calls(
        self, url: str, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]: ...


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
        request_before: messages of the agent's last request.
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
    request_before: Sequence[Read] = ()

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


class Endpoint:
    """Serves chat completions to agents. Its coroutines belong to the dispatcher's loop."""

    def __init__(
        self, dispatcher: TurnWriter, tokenizer: TextTokenizer, limits: EpisodeConfig
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
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
            return _response(error_answer("no such episode", "not_found", 404))
        size = request.content_length
        if size is None:
            size = _LARGEST_REQUEST
        if self._bytes_read + size > _MOST_READ:
            return _response(error_answer("too many requests at once", "busy", 503))
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
                if stream is None and asks_for_stream(body):
                    stream = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
                    await stream.prepare(request)
                if stream is not None:
                    await stream.write(b": waiting\n\n")
        finally:
            answer.cancel()
        _, kind, content = answer.result()
        if stream is None:
            return _response(answer.result())
        await stream.write(content if kind == EVENT_STREAM else b"data: %b\n\n" % content)
        await stream.write_eof()
        return stream

    async def answer(self, path: str, body: bytes) -> Answer:
        """Status, content type and content of the answer to a request."""
        episode = self._episodes.get(path.removeprefix("/").removesuffix("/v1/chat/completions"))
        if episode is None:
            return error_answer("no such episode", "not_found", 404)
        try:
            asked = orjson.loads(body)
            request, tools = read_request(asked, episode.request_before)
            self._refuse_too_long(request, tools)
            async with episode.lock:  # one turn at a time: the next may continue this one
                if episode.closed:
                    raise Refused("the episode has ended", "not_found", 404)
                try:
                    answer = await self._turn(episode, request, tools, asked)
                finally:  # a request that its agent gave up ends here, too
                    episode.begin_call(self._limits.call_timeout_s)
        except Refused as error:
            return error_answer(str(error), error.code, error.status)
        except VapoError as error:
            episode.failure = error
            return error_answer(str(error), "engine", HTTPStatus.SERVICE_UNAVAILABLE)
        except (ValueError, TypeError) as error:
            return error_answer(f"no valid request: {error}", "invalid_request")
        if asked.get("stream"):
            with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
            return HTTPStatus.OK, EVENT_STREAM, as_stream(answer, with_usage)
        return HTTPStatus.OK, "application/json", orjson.dumps(answer)

    def _refuse_too_long(self, request: list[Read], tools: list[Message] | None) -> None:
        """Raises Refused for what cannot fit the context; tokenising it would hold up the loop
        that carries all engines' traffic."""
        characters = _characters([read.message for read in request])
        characters += len(orjson.dumps(tools or []))
        if characters > self._most_characters:
            raise Refused(
                f"This model's maximum context length is {self._limits.max_tokens} tokens "
                f"(rollout.episode.max_tokens), the request has {characters} characters",
                "context_length_exceeded",
            )

    async def _turn(
        self,
        episode: Episode,
        given: list[Read],
        tools: list[Message] | None,
        body: dict[str, Any],
    ) -> dict[str, Any]:
        """Let the policy write one response and record it."""
        recording = episode.recording
        episode.end_tool(time.monotonic())
        episode.begin_call(self._limits.call_timeout_s)
        if recording.turns >= self._limits.max_turns:
            episode.limit = episode.limit or "turns"
            raise Refused(f"rollout.episode.max_turns={self._limits.max_turns} are taken", "limit")
        try:
            prepared = await self._prepared(recording, given, tools or [])
        except ValueError as error:
            episode.fault = "template"
            raise Refused(f"the chat template cannot be applied: {error}", "template") from None
        segment = prepared.segment
        observed = prepared.observed
        episode.request_before = given
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
            raise Refused(
                f"{limit} (rollout.episode.max_tokens), the episode has {total}",
                "context_length_exceeded",
            )
        if recording.turns == episode.pauses_at:
            episode.is_paused = episode.work is not None and episode.work.cancel()
            raise Refused(
                "the episode continues in a later step", "paused", HTTPStatus.SERVICE_UNAVAILABLE
            )
        asked = time.monotonic()
        turn = await self._generate(episode, context, room, segment.read)
        try:
            content, calls = await self._parsed(turn, tools)
        except TryAgain as error:  # the engine was lost after its response; other episodes continue
            episode.fault = "stopped"
            raise Refused(str(error), "stopped", HTTPStatus.SERVICE_UNAVAILABLE) from None
        segment.observe(observed)
        message: Message = {"role": "assistant", "content": content} | (
            {"tool_calls": calls} if calls else {}
        )
        answered = comparable([as_templates_read(message)])
        segment.write(turn, recording.turns, [read.compared for read in given] + answered)
        prepared.remember()
        if is_new:
            recording.segments.append(segment)
        episode.answered = time.monotonic()
        figures = {"tokens_written": len(turn.response_ids), "tokens_observed": len(observed)}
        episode.turns.append(
            figures | {"engine_seconds": episode.answered - asked, "tool_seconds": 0.0}
        )
        reason = "length" if turn.truncated else "tool_calls" if calls else "stop"
        return completion(
            f"chatcmpl-{turn.seed:x}", message, reason, len(context), len(turn.response_ids)
        )

    async def _prepared(
        self, recording: Recording, request: list[Read], tools: list[Message]
    ) -> Prepared:
        """The request, prepared in a thread where it takes long: the loop carries all engines'
        traffic, and tokenizers release the interpreter's lock."""
        messages = [read.message for read in request]
        segment = recording.segment_of([read.compared for read in request], tools)
        known = 0 if segment is None else len(segment.messages)
        parts = (recording, segment, messages, tools)
        if _characters(messages[known:]) < _MOST_CHARACTERS_ON_LOOP:
            is_short = _characters(messages) < _MOST_CHARACTERS_ON_LOOP
            prepared = self._renderer.prepare(*parts, may_take_long=is_short)
            if prepared is not None:
                return prepared
        prepared = await asyncio.to_thread(self._renderer.prepare, *parts)
        assert prepared is not None, "it may take long"
        return prepared

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
                raise Refused(
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
            raise Refused("the engines were stopped", "stopped", HTTPStatus.SERVICE_UNAVAILABLE)
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


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _response(answer: Answer) -> web.Response:
    status, kind, content = answer
    return web.Response(status=status, body=content, content_type=kind)
