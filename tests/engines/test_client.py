"""Requests to a server whose connections are closed, or for which there is no more room."""

import asyncio
import base64
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.inside.heartbeat import END_PATH
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.connection import EngineWrong
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rollout.dispatcher import Dispatcher, connect
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.routed_experts import ExpertChoices

GROUPS = 100


@asynccontextmanager
async def served(
    handler: Callable[[web.Request], Coroutine[Any, Any, web.Response]],
) -> AsyncIterator[str]:
    """A server of one answer to everything; its URL."""
    application = web.Application()
    application.router.add_post("/{path}", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_call_while_connections_are_being_closed_opens_its_own() -> None:
    """A group goes to a server at the moment in which another one has found it to be gone."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == f"/{columns.ABORT_PATH}":
            await asyncio.sleep(60)
        return web.json_response({})

    async def calls() -> None:
        async with served(answer) as url:
            client = EngineClient(EngineAddress(url, "no log"), 5.0)
            slow = asyncio.create_task(client.abort(["a response"]))
            await asyncio.sleep(0.1)
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)
            await client.resume()
            await closing
            with pytest.raises(TryAgain, match="the server is gone"):
                await slow
            await client.close()

    asyncio.run(calls())


def test_connections_closed_while_opening_mean_a_lost_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name is being looked up; a group whose task seemed to be cancelled would be waited for
    until a timeout."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.3) or [])

    async def calls() -> None:
        client = EngineClient(EngineAddress("http://node:1", "no log"), 5.0)
        work = asyncio.create_task(client.resume())
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(TryAgain, match="its connections were closed"):
            await work

    asyncio.run(calls())


@pytest.fixture
def few_files() -> Iterator[Callable[[int], None]]:
    """Lets this process open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    held = [os.dup(0)]
    while held[-1] < open_now + 50:  # the numbers of files that were closed are free
        held.append(os.dup(0))
    yield lambda more: resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + more, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for file in held:
        os.close(file)


def test_want_of_sockets_is_not_the_servers_fault(few_files: Callable[[int], None]) -> None:
    async def call() -> None:
        client = EngineClient(EngineAddress("http://127.0.0.1:9", "no log"), 5.0)
        few_files(0)
        with pytest.raises(
            RunFailed, match="Too many open files; each group in flight takes one, raise the limit"
        ):
            await client.resume()
        few_files(100)
        await client.close()

    asyncio.run(call())


def test_more_groups_are_on_their_way_than_a_shell_allows_files(
    few_files: Callable[[int], None],
) -> None:
    """1,024 in most shells, which 1,024 GPUs exceed; the system allows far more."""
    there: set[int] = set()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        there.add(body["input_ids"][0][0])
        while len(there) < GROUPS:
            await asyncio.sleep(0.01)
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        }
        response = {
            "output_ids": [1],
            "meta_info": meta | {"output_token_logprobs": [[0.0, 1, None]]},
        }
        return web.Response(body=columns.pack([response]), content_type=columns.MEDIA_TYPE)

    loop = LoopThread()
    servers = served(answer)
    url = loop.run(servers.__aenter__())
    few_files(GROUPS)
    prompts = [Prompt(str(n), "", "", (n,), cursor=n) for n in range(GROUPS)]
    config = RolloutConfig(collect_timeout_s=20)
    with Dispatcher([EngineAddress(url, "no log")], config, [1]) as dispatcher:
        assert (
            len(
                dispatcher.collect(
                    GenerationRequest(prompts, 1, SamplingConfig(max_new_tokens=1), 0, 0)
                )
            )
            == GROUPS
        )
    loop.run(servers.__aexit__(None, None, None))
    loop.close()


META = {
    "finish_reason": {"type": "stop"},
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
}
RIGHT = {"output_ids": [1], "meta_info": META | {"output_token_logprobs": [[0.0, 1, None]]}}


def message_of(ids: list[int], count: int = 1, **meta: Any) -> bytes:
    """Responses of these tokens, as an engine packs them."""
    rows = [[0.0, token, None] for token in ids]
    answer = {"output_ids": ids, "meta_info": META | meta | {"output_token_logprobs": rows}}
    return columns.pack([answer] * count)


class Pool:
    """The engines of a run, which are ready."""

    def __init__(self, addresses: list[EngineAddress]) -> None:
        self.addresses = addresses
        self.user: Any = None

    def attach(self, user: Any) -> None:
        self.user = user


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<html><body>It works!</body></html>", "cannot be read"),
        (b"", "cannot be read"),
        (message_of([1], count=0), "0 responses to 1 prompts"),
        (message_of([1], count=2), "2 responses to 1 prompts"),
        (message_of([1], weight_versions=[]), "IndexError"),
        (message_of([1], finish_reason=None), "TypeError"),
        (message_of([1], weight_versions=[{"version": "new"}]), "ValueError"),
        (message_of([1])[:-1], "ValueError"),
        (message_of([1]) + b"....", "not fully covered"),
        (save({}), "KeyError: 'meta'"),
        (save({"meta": np.frombuffer(b"[7", np.uint8)}), "JSONDecodeError"),
        (save({"meta": np.frombuffer(b"[{}]", np.uint8)}), "KeyError: '0/token_ids'"),
        (message_of([32]), "token ids 32 to 32, outside the"),
        (message_of([10**6]), "token ids 1000000 to 1000000, outside the"),
        (message_of([-1]), "token ids -1 to -1"),
        (message_of([1, 1]), "a response has 2 tokens, at most 1 were requested"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[:20],
)
def test_impossible_output_is_the_engines_fault_and_not_the_runs(content: bytes, why: str) -> None:
    """Its groups go to another engine; where there is none and nobody replaces it, the error names
    it."""
    kind = "text/html" if content.startswith(b"<") else columns.MEDIA_TYPE
    asked: list[str] = []

    async def malformed(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=content, content_type=kind)

    async def right(request: web.Request) -> web.Response:
        await asyncio.sleep(0.01)
        return web.Response(body=columns.pack([RIGHT]), content_type=columns.MEDIA_TYPE)

    loop = LoopThread()
    servers = [served(malformed), served(right)]
    sick, healthy = (EngineAddress(loop.run(server.__aenter__()), "no log") for server in servers)
    prompts = [Prompt(str(n), "", "", (n,), cursor=n) for n in range(4)]
    request = GenerationRequest(prompts, 1, SamplingConfig(max_new_tokens=1), 0, 0)
    config = RolloutConfig(collect_timeout_s=20)
    pool = Pool([sick, healthy])
    with connect(pool, config, [1], 32) as dispatcher:  # type: ignore[arg-type]
        assert [sample.response_ids.tolist() for sample in dispatcher.collect(request)] == [[1]] * 4
        assert pool.user is dispatcher
    assert asked.count(f"/{columns.PATH}") >= 1 and f"/{END_PATH}" in asked, (
        "its owner starts another one"
    )
    with (
        Dispatcher([sick], config, [1], vocabulary=32) as dispatcher,
        pytest.raises(EngineWrong, match=why) as told,
    ):
        dispatcher.collect(request)
    assert sick.url in str(told.value)
    for server in servers:
        loop.run(server.__aexit__(None, None, None))
    loop.close()


def test_a_response_may_take_longer_than_any_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vapo_megatron.rollout.dispatcher.REQUEST_SECONDS", 0.2)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response(body=columns.pack([RIGHT]), content_type=columns.MEDIA_TYPE)

    loop = LoopThread()
    server = served(slow)
    url = loop.run(server.__aenter__())
    sampling = SamplingConfig(max_new_tokens=1)
    request = GenerationRequest([Prompt("", "", "", (1,))], 1, sampling, 0, 0)
    with Dispatcher([EngineAddress(url, "no log")], RolloutConfig(), [1]) as dispatcher:
        assert len(dispatcher.collect(request)) == 1
        parsing = dispatcher.parse_tool_calls(url, "text", [], "qwen25")
        with pytest.raises(TryAgain, match=r"no answer to parse_function_call within 0\.2 s"):
            dispatcher.loop.run(parsing)
    loop.run(server.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(
    "content", ["<html>", "[]", "[{}]", '[{"meta_info": {"input_token_logprobs": [[0, 1]]}}]', "7"]
)
def test_nonsense_answer_to_a_probe_is_the_engines_fault(content: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=content)

    async def call() -> None:
        async with served(answer) as url:
            client = EngineClient(EngineAddress(url, "no log"), 5.0)
            with pytest.raises(EngineWrong, match="its answer to generate cannot be read"):
                await client.prompt_logprobs([[1, 2, 3]])
            await client.close()

    asyncio.run(call())


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("heeds", [True, False])
def test_experts_come_from_the_token_on_that_was_asked_for(start: int, heeds: bool) -> None:
    """heeds: whether the server omits unrequested fields; other numbers of rows than
    expected are refused."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        tokens = [*body["input_ids"][0], 9]
        rows = [[token, 0] for token in tokens[body["routed_experts_start_len"] * heeds : -1]]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        }
        meta["routed_experts"] = base64.b64encode(np.array(rows, dtype=np.int32).tobytes()).decode()
        response = {
            "output_ids": [9],
            "meta_info": meta | {"output_token_logprobs": [[0.0, 9, None]]},
        }
        message = columns.pack(
            [response], ExpertChoices(**body["expert_choices"]), body["input_ids"]
        )
        return web.Response(body=message, content_type=columns.MEDIA_TYPE)

    async def call() -> list[list[int]]:
        async with served(answer) as url:
            client = EngineClient(EngineAddress(url, "no log"), 5.0)
            try:
                (found,) = await client.generate(
                    [[4, 5, 6, 7]], [{}], ExpertChoices(1, 16, 2, start)
                )
            finally:
                await client.close()
            assert found.routed_experts is not None
            return found.routed_experts.tolist()

    if heeds or not start:
        assert asyncio.run(call()) == [[token, 0] for token in (4, 5, 6, 7)[start:]]
    else:
        with pytest.raises(EngineWrong, match="8 routed experts came for 1 tokens"):
            asyncio.run(call())


@pytest.mark.parametrize("version", ["-1", "0"])
def test_an_engine_started_again_has_no_trainers_weights(version: str) -> None:
    """By its owner, or with its owner."""
    client = EngineClient(EngineAddress("http://engine:1", "no log", owner="ab12"))
    spans = [{"version": version, "start": 0, "end": 1}]
    meta = {"finish_reason": {"type": "stop"}, "weight_versions": spans}
    answer = columns.Columns(meta, np.ones(1, np.int32), -np.ones(1, np.float32), None)
    with pytest.raises(TryAgain, match="was restarted and does not have our weights yet"):
        client._completion(answer)
    spans[0]["version"] = "cd34:1"
    with pytest.raises(RunFailed, match="weights that another trainer has synced"):
        client._completion(answer)
    spans[0]["version"] = "ab12:7"
    assert client._completion(answer).weight_version == 7
