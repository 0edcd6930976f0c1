"""A stub engine in a process of its own, for benchmarks/agents_load.py: every response takes the
same time in one of its slots, and no processor time."""

import asyncio
import heapq
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.server.address import EngineAddress

_START_SECONDS = 120.0


@contextmanager
def slot_engine(slots: int, response_s: float, ids: NDArray[np.int32]) -> Iterator[EngineAddress]:
    """An engine that answers each request with the tokens `ids` after response_s seconds in a
    slot."""
    context = multiprocessing.get_context("spawn")
    receives, sends = context.Pipe(duplex=False)
    engine = context.Process(target=_serve, args=(slots, response_s, ids, sends), daemon=True)
    engine.start()
    try:
        if not receives.poll(_START_SECONDS):
            raise SystemExit(f"the stub engine did not start within {_START_SECONDS:g} s")
        yield EngineAddress(f"http://127.0.0.1:{receives.recv()}", "no log")
    finally:
        engine.kill()
        engine.join()


def _serve(slots: int, response_s: float, ids: NDArray[np.int32], port: Any) -> None:
    """Until it is killed; sends its port."""
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    body = columns.join([columns.Columns(meta, ids, -np.ones(len(ids), np.float32), None)])
    free = [0.0] * slots

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        start = time.monotonic()
        end = max(start, heapq.heappop(free)) + response_s
        heapq.heappush(free, end)
        await asyncio.sleep(end - start)
        return web.Response(body=body, content_type=columns.MEDIA_TYPE)

    async def serve() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post(f"/{columns.PATH}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())
