"""What rank 0 pays for the responses of a rollout: requests, parsing and batch building, in seconds
of its core.

    python -m benchmarks.rollout_host [--tokens 3000000] [--length 6000] [--group 16] [--engines 2]
    [--json FILE]

Stub engines, separate processes on loopback, answer each request at once with made-up responses.
"columns" is what the trainer does: engines/server/client.py asks for columns of numbers
(engines/inside/columns.py), from which samples and the batch are made. "JSON" is what it did
before: SGLang's own answers become Python numbers, with the cyclic garbage collector off, and these
    become arrays.
Columns of the table, per million tokens:

    s to fetch    CPU seconds of rank 0 for requests, answers and parsing; s to batch: for building
    the batch ms held       the longest time for which the event loop was blocked (not per million
    tokens) MB held       growth of the process's heap once all responses have arrived

Growth is the exponent of time against tokens; 1 means linear.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import multiprocessing
import time
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.common import anonymous_bytes, growth, in_turns, parser, publish, ratio_figure
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient

PROMPT = Prompt("", "", "", tuple(range(200)))
PARAMS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 20_000,
    "stop_token_ids": [151_643],
}
IN_FLIGHT = 32


def made_up(length: int, group: int) -> list[dict[str, Any]]:
    """SGLang's answer to a group of prompts."""
    random = np.random.default_rng(0)
    answers = []
    for _ in range(group):
        ids = random.integers(0, 150_000, length).tolist()
        logprobs = (-random.exponential(1.0, length)).astype(np.float32).tolist()
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(logprobs, ids, strict=True)
            ],
            "weight_versions": [{"version": "1"}],
        }
        answers.append({"output_ids": ids, "meta_info": meta})
    return answers


def serve(length: int, group: int, port: Any) -> None:
    """A stub engine, until it is killed; puts its port."""
    answers = made_up(length, group)
    bodies = {
        columns.PATH: (columns.pack(answers), columns.MEDIA_TYPE),
        "generate": (json.dumps(answers), "text/json"),
    }

    async def run() -> None:
        application = web.Application(client_max_size=1 << 30)
        for path, (body, kind) in bodies.items():

            async def answer(
                request: web.Request, body: Any = body, kind: str = kind
            ) -> web.Response:
                await request.read()
                return web.Response(body=body, content_type=kind)

            application.router.add_post(f"/{path}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def by_columns(session: aiohttp.ClientSession, client: EngineClient, group: int) -> list[Any]:
    """A group's responses as the trainer fetches them: (token ids, log-probs) each."""
    found = await client.generate([PROMPT.token_ids] * group, [PARAMS] * group)
    return [(one.token_ids, one.logprobs) for one in found]


async def by_json(session: aiohttp.ClientSession, client: EngineClient, group: int) -> list[Any]:
    """Likewise, as it did before."""
    body = {
        "input_ids": [list(PROMPT.token_ids)] * group,
        "sampling_params": [PARAMS] * group,
        "return_logprob": True,
    }
    async with session.post(f"{client.address.url}/generate", json=body) as answer:
        text = await answer.text()
    gc.disable()
    answers = json.loads(text)
    gc.enable()
    return [
        (
            np.array(answer.pop("output_ids"), dtype=np.int32),
            np.array(
                [entry[0] for entry in answer["meta_info"].pop("output_token_logprobs")],
                dtype=np.float32,
            ),
        )
        for answer in answers
    ]


WAYS = {"JSON": by_json, "columns": by_columns}


async def fetch(way: str, ports: list[int], groups: int, group: int) -> tuple[list[Any], float]:
    """All responses, and the longest time in seconds for which the loop was held."""
    clients = [
        EngineClient(EngineAddress(f"http://127.0.0.1:{port}", "no log"), 600) for port in ports
    ]
    held, room = 0.0, asyncio.Semaphore(IN_FLIGHT)

    async def watch() -> None:
        nonlocal held
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            held = max(held, time.perf_counter() - start - 0.001)

    async def one(session: aiohttp.ClientSession, number: int) -> list[Any]:
        async with room:
            return await WAYS[way](session, clients[number % len(clients)], group)

    watcher = asyncio.create_task(watch())
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(one(session, number) for number in range(groups)))
    watcher.cancel()
    for client in clients:
        await client.close()
    return [response for answer in answers for response in answer], held


def heap() -> int:
    """Bytes of this process that are not files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of the answers goes back
    return anonymous_bytes()


def rollout(way: str, ports: list[int], tokens: int, given: argparse.Namespace) -> dict[str, float]:
    """What so many response tokens cost."""
    groups = max(1, tokens // (given.length * given.group))
    before, start = heap(), time.process_time()
    responses, held = asyncio.run(fetch(way, ports, groups, given.group))
    fetched = time.process_time() - start
    grown, start = heap() - before, time.process_time()
    samples = [
        Sample(PROMPT, number, 0, 0, ids, logprobs, "stop", 1, 1, reward=0.0)
        for number, (ids, logprobs) in enumerate(responses)
    ]
    batched = len(from_samples(samples).tokens), time.process_time() - start
    millions = groups * given.group * given.length / 1e6
    return {
        "s to fetch": fetched / millions,
        "s to batch": batched[1] / millions,
        "ms held": held * 1e3,
        "MB held": grown / millions / 1e6,
        "seconds": fetched + batched[1],
    }


def main() -> None:
    """A row for each way, growth, and their ratio."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=3_000_000, help="of responses")
    arguments.add_argument("--length", type=int, default=6000, help="tokens of a response")
    arguments.add_argument("--group", type=int, default=16, help="responses of one answer")
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    stubs = [
        context.Process(target=serve, args=(given.length, given.group, queue), daemon=True)
        for _ in range(given.engines)
    ]
    for stub in stubs:
        stub.start()
    ports = [queue.get() for _ in stubs]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    steps = [
        lambda way=way: found[way].append(rollout(way, ports, given.tokens, given)) for way in WAYS
    ]
    in_turns(steps, given.repeats)
    sizes = [given.tokens * factor // 2 for factor in (1, 2, 4, 8)]
    grown = growth(sizes, [rollout("columns", ports, size, given)["seconds"] for size in sizes])
    for stub in stubs:
        stub.kill()
    rows = []
    for way, runs in found.items():
        medians = {
            name: float(np.median([run[name] for run in runs[1:]]))
            for name in runs[0]
            if name != "seconds"
        }
        rows.append({"responses as": way, **medians, "growth": grown if way == "columns" else ""})
    seconds = {way: [run["seconds"] for run in runs[1:]] for way, runs in found.items()}
    figures = [
        ratio_figure("rank 0's seconds, JSON over columns", seconds["JSON"], seconds["columns"])
    ]
    title = f"for a million response tokens; {given.tokens:,} of them, {given.length} a response"
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()
