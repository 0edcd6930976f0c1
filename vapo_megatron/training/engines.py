"""The engines of a run: started by the ranks that own them, asked for responses by rank 0, fed with weights by all.

With GPUs, `rollout.tp` consecutive ranks share their GPUs with one engine, which the first of them owns. Without, each
of the first ranks owns one.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.client import EngineClient
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.server import EngineAddress, EngineServer
from vapo_megatron.rollout.sync import WeightSync
from vapo_megatron.training.probe import probe_batch, split_logprobs
from vapo_megatron.weights.export import stream_hf

_NAMED_IN_AN_ERROR = 8


class Engines:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager."""

    def __init__(
        self, config: RolloutConfig, model_dir: Path, dtype: str, log_dir: Path, stop_token_ids: Sequence[int]
    ) -> None:
        """Collective: decide who owns what; start() follows."""
        self._config, self._dtype = config, dtype
        self._stop_token_ids = stop_token_ids
        self._server: EngineServer | None = None
        self._sync: WeightSync | None = None
        self._dispatcher: Dispatcher | None = None
        self.version = self.count = 0
        self._asleep: set[str] = set()
        rank, platform = dist.get_rank(), current_platform()
        host = _reachable_host()
        self._group = _engine_group(config.tp) if platform.is_cuda else None
        index = rank // config.tp if platform.is_cuda else rank
        owns = rank % config.tp == 0 if platform.is_cuda else rank < config.engines
        if owns:
            devices = None
            if platform.is_cuda:
                first = torch.cuda.current_device()
                devices = range(first, first + config.tp)
            self._server = EngineServer(model_dir, config, dtype, log_dir / f"engine_{index}.log", devices, host=host)

    def start(self) -> None:
        """Begin to start this rank's server; wait_until_ready follows once there is nothing better to do."""
        if self._server is not None:
            self._server.start()

    def wait_until_ready(self) -> None:
        """Collective: every server answers when this returns.

        Raises:
            RunFailed: one did not start; its log's cause is named.
        """
        address = None
        if self._server is not None:
            self._server.wait_until_ready()
            address = self._server.address
        addresses: list[EngineAddress | None] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, address)
        servers = [found for found in addresses if found is not None]
        self.count = len(servers)
        if dist.get_rank() == 0:
            self._dispatcher = Dispatcher(servers, self._config, self._stop_token_ids)
        if current_platform().is_cuda:
            gather = partial(_gather_payloads, group=self._group) if self._config.tp > 1 else None
            barrier = partial(dist.barrier, group=self._group) if self._config.tp > 1 else None
            device = current_platform().device
            self._sync = WeightSync(address, self._config.sync, self._config.tp, device, gather, barrier)
        elif address is not None:
            self._sync = WeightSync(address, self._config.sync, self._config.tp)

    def collect(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingConfig,
        seed: int,
        advance: Callable[[int], None],
    ) -> list[Sample]:
        """On rank 0: n responses to each prompt, by the weights of the last hand-over. advance counts them."""
        assert self._dispatcher is not None
        seen = 0

        def on_done(finished: int) -> None:
            nonlocal seen
            advance(finished - seen)
            seen = finished

        return self._dispatcher.collect(prompts, n, sampling, seed, self.version, on_done)

    def hand_over(self, actor: Trainable) -> None:
        """Collective: the engines get the actor's weights, re-sharded, under the next version.

        Raises:
            RunFailed: a name or shape that an engine does not take, or a parameter that was not sent.
        """
        self.version += 1
        if self._sync is not None:
            self._sync.push(self._buckets(actor), self.version)
        else:
            for _ in self._buckets(actor):
                pass

    def check(self, actor: Trainable, sequences: Sequence[Sequence[int]]) -> float:
        """Collective: the largest difference of the log-probs that actor and engines give to some sequences.

        Raises:
            RunFailed: it is above the tolerance; the tensors that differ are named.
        """
        batch = probe_batch(sequences)
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        largest = 0.0
        if self._server is not None:
            assert self._sync is not None
            largest = self._sync.verify(sequences, ours, float("inf"))
        found = torch.tensor([largest], dtype=torch.float64, device=current_platform().device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        tolerance = self._config.sync.tolerance_for("float32" if self._dtype == "float32" else "bfloat16")
        if float(found) > tolerance:
            self._explain(actor, float(found), tolerance)
        return float(found)

    def sleep(self) -> None:
        """Collective: the engines give their GPU memory to the trainer."""
        if current_platform().is_cuda and self._config.memory_saver:
            self._memory("release_memory", ("kv_cache", "weights"))
            self._asleep = {"kv_cache", "weights"}

    def wake(self, tag: str) -> None:
        """Collective: the engines take memory again; "weights" before a hand-over, "kv_cache" after it."""
        if tag in self._asleep:
            self._memory("resume_memory", (tag,))
            self._asleep.discard(tag)

    def close(self) -> None:
        """End this rank's server and connections."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._sync is not None:
            self._sync.close()
        if self._server is not None:
            self._server.stop()
        self._dispatcher = self._sync = self._server = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _buckets(self, actor: Trainable) -> Any:
        return stream_hf(actor.chunks, actor.spec, actor.mesh, "lm", self._config.sync.bucket_mib << 20)

    def _memory(self, method: str, tags: tuple[str, ...]) -> None:
        current_platform().empty_cache()
        if self._server is not None:
            client = EngineClient(self._server.address, self._config.sync.deadline)

            async def call() -> None:
                await getattr(client, method)(tags)
                await client.close()

            asyncio.run(call())
        dist.barrier()

    def _explain(self, actor: Trainable, largest: float, tolerance: float) -> None:
        lines: list[str] = []
        if self._sync is not None:
            lines = self._sync.differing_tensors(self._buckets(actor))
        else:
            for _ in self._buckets(actor):
                pass
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, lines)
        named = list(dict.fromkeys(itertools.chain.from_iterable(gathered)))
        what = "; ".join(named[:_NAMED_IN_AN_ERROR]) or "every tensor is equal, so the two compute differently"
        more = f"; and {len(named) - _NAMED_IN_AN_ERROR} more" if len(named) > _NAMED_IN_AN_ERROR else ""
        raise RunFailed(
            f"log-probs of engine and trainer differ by {largest:.3g} after the hand-over of version {self.version} "
            f"(rollout.sync.tolerance {tolerance:g}): {what}{more}"
        )


def _reachable_host() -> str:
    """Collective: the address under which rank 0 reaches a server of this rank."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    if len(set(names)) == 1:
        return "127.0.0.1"
    # The address that faces the place where ranks meet; a host's own name may stand for 127.0.1.1. Nothing is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((os.environ["MASTER_ADDR"], 9))
        return str(route.getsockname()[0])


def _engine_group(tp: int) -> Any:
    """Collective: the group of the ranks that share their GPUs with one engine, this rank's. On the CPU's backend."""
    own = None
    for first in range(0, dist.get_world_size(), tp):
        ranks = list(range(first, first + tp))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    return own


def _gather_payloads(payload: bytes, group: Any) -> list[bytes] | None:
    owner = dist.get_process_group_ranks(group)[0]
    gathered: list[bytes] | None = [b""] * group.size() if dist.get_rank() == owner else None
    dist.gather_object(payload, gathered, dst=owner, group=group)
    return gathered
