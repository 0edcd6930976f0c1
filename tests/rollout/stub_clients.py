"""Servers that answer without a network, and a dispatcher and a stream on them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import FinishReason, Prompt
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest
from vapo_megatron.rollout.stream import GroupStream, Work

SAMPLING = SamplingConfig(max_new_tokens=8)
PROMPTS = [Prompt(str(n), "", "", (n,), cursor=n) for n in range(12)]


class Client:
    """A server that answers after its own delay; the first token of a response equals the
    prompt."""

    def __init__(self, address: EngineAddress, seconds: float, version: int = 0) -> None:
        self.address = address
        self.seconds = seconds
        self.version = version
        self.oldest: int | None = None  # of the first token, if not the last's
        self.asked: list[int] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.gone = asyncio.Event()
        self.stopped = asyncio.Event()
        self.read: list[tuple[list[int], int]] = []
        self.refusal: RunFailed | None = None
        self.params: list[dict[str, Any]] = []
        self.experts_asked: list[Any] = []
        self.experts: Tensor | None = None  # that it reports
        self.most_running = 0
        self.aborts: list[list[str]] = []
        self.abort_error: Exception | None = None
        self.abort_seconds = 0.0

    async def generate(
        self,
        prompts: Sequence[Any],
        params: Any,
        experts: Any,
        ids: Sequence[str],
        unfinished: bool,
    ) -> list[Completion]:
        self.asked.append(prompts[0][0])
        self.read += [
            (list(prompt), given["max_new_tokens"])
            for prompt, given in zip(prompts, params, strict=True)
        ]
        self.params += params
        self.experts_asked.append(experts)
        self.running |= set(ids)
        self.most_running = max(self.most_running, len(self.running))
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gone, self.stopped)]
        try:
            await asyncio.wait(waits, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            if self.gone.is_set():
                raise TryAgain("the server is gone")
            if self.refusal is not None:
                raise self.refusal
            if self.stopped.is_set() and unfinished:
                self.stopped.clear()
                both = [
                    self.completion(prompts[0][0], 3, "abort"),
                    self.completion(prompts[0][0], 2, "stop"),
                ]
                return both[: len(ids)]
            return [self.completion(prompts[0][0], 2, "stop") for _ in ids]
        finally:
            for wait in waits:
                wait.cancel()
            self.running -= set(ids)

    def completion(self, first: int, length: int, reason: FinishReason) -> Completion:
        ids = np.array([first, *range(1, length)], dtype=np.int32)
        version = self.version
        return Completion(
            ids,
            np.full(length, -1.0 - version, np.float32),
            reason,
            version if self.oldest is None else self.oldest,
            version,
            self.experts,
            versions=((version, length),),
        )

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborts.append(list(ids))
        await asyncio.sleep(self.abort_seconds)
        if self.abort_error is not None:
            raise self.abort_error
        self.aborted |= set(ids)
        self.stopped.set()

    async def parse_tool_calls(self, *arguments: Any) -> tuple[str, list[Any]]:
        return self.address.url, list(arguments)

    async def close(self) -> None:
        self.gone.set()


def dispatcher(
    *seconds: float, urls: Sequence[str] = (), are_replaced: bool = False, **settings: Any
) -> tuple[Dispatcher, list[Client]]:
    """seconds: in which each server answers. urls: where they are; http://engine0 and so on by
    default."""
    places = urls or [f"http://engine{n}" for n in range(len(seconds))]
    clients = {
        url: Client(EngineAddress(url, f"{url}.log"), time)
        for url, time in zip(places, seconds, strict=True)
    }
    addresses = [client.address for client in clients.values()]
    chosen: Any = lambda address, _: clients[address.url]  # noqa: E731
    return Dispatcher(addresses, RolloutConfig(**settings), [1], are_replaced, client=chosen), list(
        clients.values()
    )


def request(version: int = 0) -> GenerationRequest:
    return GenerationRequest(PROMPTS, 2, SAMPLING, 1, version)


def stream_of(
    made: Dispatcher,
    rule: StepRule,
    grade: Any,
    useful: Any = lambda group: True,
    timeout_s: float = 20.0,
) -> GroupStream:
    def ask(prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, 2, SAMPLING, 8, 1, 0)

    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
    return GroupStream(
        made, prompts, Ledger(rule), Work(ask, grade, useful, 2 * rule.groups, timeout_s)
    )
