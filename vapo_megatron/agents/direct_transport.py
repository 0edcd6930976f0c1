"""The way to the endpoint for agents of the same process."""

import asyncio

import httpx

from vapo_megatron.agents.endpoint import KEEP_ALIVE_S, Endpoint
from vapo_megatron.agents.openai_format import asks_for_stream
from vapo_megatron.loop_thread import LoopThread


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
        if seconds is not None and seconds > KEEP_ALIVE_S and asks_for_stream(body):
            seconds = None  # a socket would bring a sign of life before
        try:
            status, kind, content = await asyncio.wait_for(asyncio.wrap_future(work), seconds)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s", request=request) from None
        return httpx.Response(status, headers={"Content-Type": kind}, content=content)
