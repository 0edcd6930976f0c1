"""The engines of a run: asked for responses by rank 0, fed with weights by all.

With GPUs, `rollout.tp` consecutive ranks share their GPUs with one engine, which the first of them starts and owns.
Without, each of the first ranks owns one. Engines of rollout.external_urls run on devices of their own and were
started by somebody else; rank 0 feeds all of them, by one broadcast.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.experience.sample import Sample
from vapo_megatron.mcore.mesh import world_timeout
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.client import EngineClient
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.remote_engines import RemoteEngines, take_over_engines, what_must_agree
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.rollout.server import EngineAddress, EngineServer
from vapo_megatron.training.broadcast import on_rank_zero
from vapo_megatron.weight_sync.broadcast_group import Backend, address_towards
from vapo_megatron.weight_sync.logprob_difference import LogprobDifference, Precision, limits_of
from vapo_megatron.weight_sync.probe import probe_batch, split_logprobs
from vapo_megatron.weight_sync.session import WeightSync
from vapo_megatron.weight_sync.transports import (
    DiskTransport,
    DistributedTransport,
    IpcTransport,
    SharedMemoryTransport,
    Transport,
)
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, NamedTensors, SharedSlots
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.part_times import PartTimes
from vapo_megatron.weights.spec import read_spec

_NAMED_IN_AN_ERROR = 8


class Engines:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager."""

    def __init__(
        self,
        config: RolloutConfig,
        model_dir: Path,
        dtype: Dtype,
        log_dir: Path,
        stop_token_ids: Sequence[int],
        fp8: BlockFp8 | None = None,
    ) -> None:
        """Collective: decide who owns what; start() follows.

        fp8 is how weights are quantised for the engines, where rollout.quantization asks for it.

        Raises:
            BadInput: rollout.sync.transport is not possible on this machine.
        """
        self._config, self._dtype, self._fp8, self._log_dir = config, dtype, fp8, log_dir
        self._model_dir = model_dir
        self._transport_name = _transport_name(config, current_platform().is_cuda)
        self._stop_token_ids = stop_token_ids
        self._server: EngineServer | None = None
        self._sync: WeightSync | None = None
        self._slots: DeviceSlots | SharedSlots | None = None
        self.sync_seconds: dict[str, float] = {}
        self._dispatcher: Dispatcher | None = None
        self.version = self.count = 0
        self._offloaded: set[str] = set()
        self._group: Any = None
        if not config.external_urls:
            self._own_server()

    @property
    def share_device(self) -> bool:
        """Whether engines live in the trainer's memory, and so have to take turns with it."""
        return current_platform().engines_share_device and not self._config.external_urls

    def _own_server(self) -> None:
        """Collective: the server of this rank, where it owns one."""
        config = self._config
        rank, platform = dist.get_rank(), current_platform()
        host = _reachable_host()
        self._group = _engine_group(config.tp) if platform.is_cuda else None
        index = rank // config.tp if platform.is_cuda else rank
        owns = rank % config.tp == 0 if platform.is_cuda else rank < config.num_engines
        if owns:
            devices = None
            if platform.is_cuda:
                first = torch.cuda.current_device()
                devices = range(first, first + config.tp)
            log_file = self._log_dir / f"engine_{index}.log"
            self._server = EngineServer(
                self._model_dir, config, self._dtype, log_file, devices, host=host, fp8=self._fp8
            )

    def start(self) -> None:
        """Begin to start this rank's server; wait_until_ready follows once there is nothing better to do."""
        if self._server is not None:
            self._server.start()

    def wait_until_ready(self) -> None:
        """Collective: every server answers when this returns.

        Raises:
            RunFailed: one did not start; its log's cause is named.
            BadInput, TryAgain: see take_over_engines.
        """
        if self._config.external_urls:
            self._meet_remote()
            return
        address = None
        if self._server is not None:
            self._server.wait_until_ready()
            address = self._server.address
        addresses: list[EngineAddress | None] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, address)
        servers = [found for found in addresses if found is not None]
        self._meet(servers)
        transport = self._transport(address)
        self._sync = None if transport is None else WeightSync(transport)

    def _meet_remote(self) -> None:
        spec = read_spec(self._model_dir)
        agreed = what_must_agree(self._config, spec, self._dtype, self._fp8)
        engines = on_rank_zero(lambda: take_over_engines(self._config, agreed))
        self._meet(engines.addresses)
        if dist.get_rank() == 0:
            self._sync = WeightSync(self._remote_transport(engines))

    def _meet(self, servers: Sequence[EngineAddress]) -> None:
        self.count = len(servers)
        if dist.get_rank() == 0:
            self._dispatcher = Dispatcher(servers, self._config, self._stop_token_ids)

    def collect(self, request: GenerationRequest, on_done: Callable[[int], None] | None = None) -> list[Sample]:
        """On rank 0: see Dispatcher.collect. A request's weight_version is that of the last weight sync, `version`."""
        assert self._dispatcher is not None
        return self._dispatcher.collect(request, on_done)

    def sync_weights(self, actor: Trainable) -> None:
        """Collective: the engines get the actor's weights, re-sharded, under the next version.

        Raises:
            RunFailed: a name or shape that an engine does not take, or a parameter that was not sent.
        """
        self.version += 1
        times = PartTimes()
        if self._sync is not None:
            self._sync.push(self._buckets(actor, times), self.version, times)
        else:
            self._stream_for_others(actor, times)
        self.sync_seconds = times.read()
        self._free_device_buffers()

    def _free_device_buffers(self) -> None:
        """On a GPU the buffers of a weight sync give way to caches, activations and optimizer states."""
        if current_platform().is_cuda and self._slots is not None:
            self._slots.close()
            self._slots = None
            torch.cuda.ipc_collect()
            current_platform().empty_cache()

    def check(
        self, actor: Trainable, sequences: Sequence[Sequence[int]], before_asking: Callable[[], None] = lambda: None
    ) -> LogprobDifference:
        """Collective: the difference of the log-probs that actor and engines give to some sequences.

        before_asking: called when the actor has done its part and before the engines do theirs.

        Raises:
            RunFailed: it is above a tolerance; the tensors that differ are named.
        """
        batch = probe_batch(sequences)
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        before_asking()
        coarser: Precision = "bfloat16" if "bfloat16" in (self._dtype, self._config.dtype) else "float32"
        limits = limits_of(self._config.sync, "fp8" if self._fp8 is not None else coarser)
        own = []
        if self._sync is not None and self._sync.owns:
            own = self._sync.logprob_differences(sequences, ours, limits.share)
        # Over the CPU: engines on these GPUs may still be at work.
        worst = torch.tensor(astuple(LogprobDifference.worst(own)), dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        found = LogprobDifference(*worst.tolist())
        if (excess := limits.excess(found)) is not None:
            self._explain(actor, excess)
        return found

    def offload(self) -> None:
        """Collective: the engines give their GPU memory to the trainer."""
        if self.share_device and self._config.memory_saver:
            self._memory("release_memory", ("kv_cache", "weights"))
            self._offloaded = {"kv_cache", "weights"}

    @contextmanager
    def kv_cache_offloaded(self) -> Iterator[None]:
        """Collective: engines give the memory of their KV caches, with what is in them, for a while."""
        lends = self.offload_kv_cache()
        yield
        if lends:
            self.onload("kv_cache")

    def offload_kv_cache(self) -> bool:
        """Collective: engines with a KV cache give it up until onload("kv_cache"). Returns whether they do."""
        lends = self.share_device and self._config.memory_saver and not self._offloaded
        if lends:
            self._memory("release_memory", ("kv_cache",))
            self._offloaded = {"kv_cache"}
        return lends

    def onload(self, tag: str) -> None:
        """Collective: the engines take memory again; "weights" before a weight sync, "kv_cache" after it."""
        if tag in self._offloaded:
            self._memory("resume_memory", (tag,))
            self._offloaded.discard(tag)

    def close(self) -> None:
        """End this rank's server and connections."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._sync is not None:
            self._sync.close()
        if self._slots is not None:
            self._slots.close()
        if self._server is not None:
            self._server.stop()
        self._dispatcher = self._sync = self._slots = self._server = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transport(self, address: EngineAddress | None) -> Transport | None:
        """Of this rank to its engine; None where it has no part in it."""
        config, name = self._config.sync, self._transport_name
        client = None if address is None else EngineClient(address, config.request_timeout_s)
        if name == "ipc":
            several = self._config.tp > 1
            gather = partial(_gather_payloads, group=self._group) if several else None
            barrier = partial(dist.barrier, group=self._group) if several else None
            return IpcTransport(client, current_platform().device, gather, barrier)
        if client is None:
            return None
        if name == "distributed":
            return DistributedTransport([client], self._config.tp, config.request_timeout_s)
        if name == "disk":
            return DiskTransport([client], Path(config.directory or self._log_dir))
        return SharedMemoryTransport(client, self._config.tp)

    def _remote_transport(self, engines: RemoteEngines) -> Transport:
        """Of rank 0 to all engines that are not the run's own."""
        config = self._config.sync
        clients = [EngineClient(address, config.request_timeout_s) for address in engines.addresses]
        if self._transport_name == "disk":
            return DiskTransport(clients, Path(config.directory or self._log_dir))
        backend: Backend = "nccl" if engines.cuda and current_platform().is_cuda else "gloo"
        return DistributedTransport(clients, self._config.tp, config.request_timeout_s, backend)

    def _buckets(self, actor: Trainable, times: PartTimes | None = None) -> Iterator[NamedTensors]:
        stream = self._stream(actor, times)
        return stream if self._fp8 is None else self._fp8.convert(stream)

    def _stream(self, actor: Trainable, times: PartTimes | None) -> Iterator[Bucket]:
        if self._slots is None:
            self._slots = make_slots(actor.mesh, current_platform().device)
        limit = self._config.sync.bucket_mib << 20
        slots, sums = self._slots, self._fp8 is None
        # Quantised tensors are made of the bucket's, and other transports send the buffer alone.
        lent = actor.shared_weights if sums and self._transport_name == "shared_memory" else None
        return stream_hf(
            actor.chunks, actor.spec, actor.mesh, "lm", limit, slots=slots, times=times, sums=sums, lent=lent
        )

    def _stream_for_others(self, actor: Trainable, times: PartTimes | None = None) -> None:
        """Take part in the collectives of a stream that this rank has no use for."""
        for _ in self._stream(actor, times):
            pass

    def _memory(self, method: str, tags: tuple[str, ...]) -> None:
        current_platform().empty_cache()
        if self._server is not None:
            client = EngineClient(self._server.address, self._config.sync.request_timeout_s)

            async def call() -> None:
                await getattr(client, method)(tags)
                await client.close()

            asyncio.run(call())
        dist.barrier()

    def _explain(self, actor: Trainable, excess: str) -> None:
        self.offload_kv_cache()
        lines: list[str] = []
        if self._sync is not None:
            lines = self._sync.differing_tensors(self._buckets(actor))
        else:
            self._stream_for_others(actor)
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, lines)
        named = list(dict.fromkeys(itertools.chain.from_iterable(gathered)))
        what = "; ".join(named[:_NAMED_IN_AN_ERROR]) or "every tensor is equal, so the two compute differently"
        more = f"; and {len(named) - _NAMED_IN_AN_ERROR} more" if len(named) > _NAMED_IN_AN_ERROR else ""
        raise RunFailed(
            f"log-probs of engine and trainer differ after the weight sync of version {self.version} {excess}: "
            f"{what}{more}"
        )


def _transport_name(config: RolloutConfig, is_cuda: bool) -> str:
    name = config.sync.transport
    if name == "ipc" and not is_cuda:
        raise BadInput("rollout.sync.transport=ipc needs GPUs and there are none: set it to auto")
    if config.external_urls:
        return "disk" if name == "disk" else "distributed"
    if name == "auto":
        return "ipc" if is_cuda else "shared_memory"
    return name


def _reachable_host() -> str:
    """Collective: the address under which rank 0 reaches a server of this rank."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    if len(set(names)) == 1:
        return "127.0.0.1"
    return address_towards(os.environ["MASTER_ADDR"])


def _engine_group(tp: int) -> Any:
    """Collective: the group of the ranks that share their GPUs with one engine, this rank's. On the CPU's backend."""
    own = None
    for first in range(0, dist.get_world_size(), tp):
        ranks = list(range(first, first + tp))
        group = dist.new_group(ranks, timeout=world_timeout(), backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    return own


def _gather_payloads(payload: bytes, group: Any) -> list[bytes] | None:
    owner = dist.get_process_group_ranks(group)[0]
    gathered: list[bytes] | None = [b""] * group.size() if dist.get_rank() == owner else None
    dist.gather_object(payload, gathered, dst=owner, group=group)
    return gathered
