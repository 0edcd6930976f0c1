"""Stub engines for benchmarks/twin.py: they generate no tokens, but take the time that tokens would
at a given rate."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from vapo_megatron.engines.inside import columns

PROMPT, AT_ONCE = 20, 24  # tokens of every prompt, and responses that an engine generates together
LengthOf = Callable[[int, int], int]
"""Tokens of the response to a prompt, by the prompt's first token and the response's seed."""


def decode_seconds(running: float, context: float) -> float:
    """Seconds of an engine's decoding step."""
    return 0.018 + 0.0003 * running + 5e-7 * running * context


def prefill_seconds(tokens: float) -> float:
    """Seconds in which an engine reads so many tokens."""
    return 0.0006 * tokens


class Stub:
    """An engine that goes through its batch token by token, and sleeps for each."""

    def __init__(self, length_of: LengthOf) -> None:
        self.length_of, self.version, self.paused = length_of, 0, False
        self.waiting: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.changed = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        """A request for the responses to one prompt."""
        body, entries = await request.json(), []
        done = asyncio.Event()
        call = {"left": len(body["rid"]), "done": done, "read": False}
        for name, prompt, params in zip(
            body["rid"], body["input_ids"], body["sampling_params"], strict=True
        ):
            length = self.length_of(prompt[0], params["sampling_seed"]) - (len(prompt) - PROMPT)
            entries.append(
                {
                    "name": name,
                    "call": call,
                    "had": len(prompt),
                    "length": length,
                    "spans": [],
                    "reason": "stop",
                }
            )
        self.waiting += entries
        self.changed.set()
        await done.wait()
        return web.Response(
            body=columns.pack([self.answer(one) for one in entries]),
            content_type=columns.MEDIA_TYPE,
        )

    def answer(self, one: dict[str, Any]) -> dict[str, Any]:
        """As SGLang's."""
        start, spans = 0, []
        for version, count in one["spans"] or [(self.version, 0)]:
            spans.append({"version": str(version), "start": start, "end": start + count})
            start += count
        meta = {"finish_reason": {"type": one["reason"]}, "weight_versions": spans}
        return {
            "output_ids": [0] * start,
            "meta_info": meta | {"output_token_logprobs": [[0.0, 0, None]] * start},
        }

    def finish(self, one: dict[str, Any], reason: str) -> None:
        """One response is done."""
        one["reason"] = reason
        one["call"]["left"] -= 1
        if one["call"]["left"] == 0:
            one["call"]["done"].set()

    async def abort(self, request: web.Request) -> web.Response:
        """End responses, with what there is of them."""
        names = set(await request.json())
        for batch in (self.running, self.waiting):
            for one in [one for one in batch if one["name"] in names]:
                batch.remove(one)
                self.finish(one, "abort")
        return web.json_response({})

    async def pause(self, request: web.Request) -> web.Response:
        """Stop; retracted responses are read anew."""
        self.paused = True
        if (await request.json())["mode"] == "retract":
            for one in self.running:
                one["call"]["read"] = False
            self.waiting, self.running = self.running + self.waiting, []
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on."""
        self.paused = False
        self.changed.set()
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        """Weights of a version."""
        self.version = int((await request.json())["weight_version"])
        return web.json_response({"message": '{"problems": [], "seconds": 0, "checksums": []}'})

    def begin_waiting(self) -> float:
        """Start what there is room for; the seconds of reading it."""
        seconds = 0.0
        while self.waiting and len(self.running) < AT_ONCE:
            one = self.waiting.pop(0)
            written = sum(count for _, count in one["spans"])
            context = one["had"] + written
            seconds += prefill_seconds(context - (PROMPT if one["call"]["read"] else 0))
            one["call"]["read"] = True
            self.running.append(one)
        return seconds

    async def work(self) -> None:
        """For ever."""
        while True:
            now = time.monotonic()
            while not self.paused and (self.running or self.waiting):
                now += self.begin_waiting()
                tokens = sum(
                    one["had"] + sum(count for _, count in one["spans"]) for one in self.running
                )
                batch = list(self.running)
                now += decode_seconds(len(batch), tokens / len(batch))
                await asyncio.sleep(max(0.0, now - time.monotonic()))
                for one in batch:
                    if one in self.running:  # not aborted, not retracted
                        self.write(one)
            self.changed.clear()
            await self.changed.wait()

    def write(self, one: dict[str, Any]) -> None:
        """A token."""
        spans = one["spans"]
        if spans and spans[-1][0] == self.version:
            spans[-1] = (self.version, spans[-1][1] + 1)
        else:
            spans.append((self.version, 1))
        if sum(count for _, count in spans) >= one["length"]:
            self.running.remove(one)
            self.finish(one, "stop")


def serve(runs: Sequence[Sequence[LengthOf]], ports: Any) -> None:
    """The engines of some runs, until they are killed; puts the ports of each run."""

    async def start(length_of: LengthOf) -> tuple[int, "asyncio.Task[None]"]:
        stub, application = Stub(length_of), web.Application(client_max_size=1 << 30)
        application.router.add_post(f"/{columns.PATH}", stub.generate)
        application.router.add_post(f"/{columns.ABORT_PATH}", stub.abort)
        application.router.add_post("/pause_generation", stub.pause)
        application.router.add_post("/continue_generation", stub.resume)
        application.router.add_post("/update_weights_from_tensor", stub.load)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1]), asyncio.create_task(stub.work())

    async def run() -> None:
        started = [[await start(length_of) for length_of in engines] for engines in runs]
        ports.put([[port for port, _ in stubs] for stubs in started])
        await asyncio.gather(*(task for stubs in started for _, task in stubs))

    asyncio.run(run())
