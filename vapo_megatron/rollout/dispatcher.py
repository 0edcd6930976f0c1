"""Spreads prompts over all servers and brings the responses back in order."""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.rollout.client import Completion, EngineClient
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.rollout.server import EngineAddress

# Groups waiting in a server keep its batch full while finished ones are on their way back.
_QUEUED_PER_RUNNING = 2


def response_seed(seed: int, cursor: int, index: int) -> int:
    """Seed of response `index` to prompt `cursor` of a run, in [0, 2^63): the same on every machine and version."""
    message = struct.pack("<qqq", seed, cursor, index)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


@dataclass
class _Engine:
    """A server and what it has been given that is not back yet."""

    client: EngineClient
    requests: int = 0
    tokens: int = 0


class Dispatcher:
    """Rank 0's way to all servers. Its methods block; inside, one event loop talks to every server at once.

    Args:
        engines: all servers of the job.
        config: the rollout section.
        stop_token_ids: tokens that end a response; they belong to it.
    """

    def __init__(self, engines: Sequence[EngineAddress], config: RolloutConfig, stop_token_ids: Sequence[int]) -> None:
        self._config = config
        self._stop_token_ids = list(stop_token_ids)
        self._engines = [_Engine(EngineClient(address, config.collect_timeout_s)) for address in engines]
        self._runner = asyncio.Runner()

    def collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None = None,
        on_group: Callable[[list[Sample]], None] | None = None,
    ) -> list[Sample]:
        """The responses to a request, ordered by (group, index); group is the prompt's place in request.prompts.

        Every group goes to the server with the fewest tokens outstanding.

        Args:
            request: what to generate.
            on_done: called with the number of responses that have just finished.
            on_group: called with the responses to a prompt as soon as they are there.

        Raises:
            RunFailed: a response came from weights of another version or with experts that cannot be, or a server
                refused a request.
            TryAgain: a server is gone, or rollout.collect_timeout_s passed.
        """
        return self._runner.run(self._collect(request, on_done, on_group))

    def close(self) -> None:
        """Close all connections. The servers live on."""
        self._runner.run(self._close_clients())
        self._runner.close()

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _close_clients(self) -> None:
        for engine in self._engines:
            await engine.client.close()

    async def _collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None,
        on_group: Callable[[list[Sample]], None] | None,
    ) -> list[Sample]:
        n = request.samples_per_prompt
        for engine in self._engines:
            engine.requests = engine.tokens = 0
        finished = 0
        freed = asyncio.Condition()

        async def sample_group(engine: _Engine, group: int, prompt: Prompt) -> list[Sample]:
            nonlocal finished
            seeds = [response_seed(request.seed, prompt.cursor, index) for index in range(n)]
            params = [self._sampling_params(request.sampling, request.limit(group), seed) for seed in seeds]
            completions = await engine.client.generate([prompt.token_ids] * n, params, request.routed_experts)
            async with freed:
                engine.requests -= n
                engine.tokens -= request.max_tokens(group)
                freed.notify_all()
            finished += n
            if on_done is not None:
                on_done(n)
            _check_version(engine.client.address, completions, request.weight_version)
            samples = [
                _sample(prompt, group, index, seeds[index], completion) for index, completion in enumerate(completions)
            ]
            if on_group is not None:
                on_group(samples)
            return samples

        try:
            async with asyncio.timeout(self._config.collect_timeout_s), asyncio.TaskGroup() as tasks:
                groups = []
                for group, prompt in enumerate(request.prompts):
                    async with freed:
                        await freed.wait_for(lambda: any(self._has_room(engine, n) for engine in self._engines))
                    engine = min((e for e in self._engines if self._has_room(e, n)), key=lambda e: e.tokens)
                    engine.requests += n
                    engine.tokens += request.max_tokens(group)
                    groups.append(tasks.create_task(sample_group(engine, group, prompt)))
        except TimeoutError:
            raise TryAgain(
                f"{finished} of {request.num_samples} responses came within rollout.collect_timeout_s="
                f"{self._config.collect_timeout_s:g} s: raise it, or look into the servers' logs, the first of them "
                f"{self._engines[0].client.address.log_file}"
            ) from None
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [sample for task in groups for sample in task.result()]

    def _has_room(self, engine: _Engine, n: int) -> bool:
        limit = _QUEUED_PER_RUNNING * self._config.max_running_requests
        return engine.requests == 0 or engine.requests + n <= limit

    def _sampling_params(self, sampling: SamplingConfig, max_new_tokens: int, seed: int) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": self._stop_token_ids,
            "sampling_seed": seed,  # read with rollout.deterministic alone
        }


def _check_version(address: EngineAddress, completions: Sequence[Completion], expected: int) -> None:
    for completion in completions:
        if not completion.weight_version_oldest == completion.weight_version == expected:
            raise RunFailed(
                f"{address.url} (log {address.log_file}): a response was made by weights of version "
                f"{completion.weight_version_oldest} to {completion.weight_version}, expected {expected}: "
                "a weight sync was missed"
            )


def _sample(prompt: Prompt, group: int, index: int, seed: int, completion: Completion) -> Sample:
    return Sample(
        prompt=prompt,
        group=group,
        index=index,
        seed=seed,
        response_ids=completion.token_ids,
        rollout_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        weight_version=completion.weight_version,
        weight_version_oldest=completion.weight_version_oldest,
        routed_experts=completion.routed_experts,
    )


def _first(errors: BaseExceptionGroup) -> BaseException:
    """One of the errors of several tasks: the one to tell of."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
