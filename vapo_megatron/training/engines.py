"""The engines of a run: asked for responses by rank 0, fed with weights by all."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.experience.sample import Sample
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.client import EngineClient, MemoryTag, PauseMode
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.training.placement import EngineSettings, place_engines
from vapo_megatron.weight_sync.actor_sync import ActorSync
from vapo_megatron.weight_sync.logprob_difference import LogprobDifference
from vapo_megatron.weights.fp8 import BlockFp8


class Engines:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager.

    Attributes:
        version: of the last weight sync; samples carry it.
        count: of engines.
        sync_seconds: of the last weight sync, by part.
    """

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
        self._config, self._dtype, self._fp8, self._stop_token_ids = config, dtype, fp8, stop_token_ids
        self._placement = place_engines(EngineSettings(config, model_dir, dtype, log_dir, fp8), current_platform())
        self._sync: ActorSync | None = None
        self._dispatcher: Dispatcher | None = None
        self._offloaded: set[MemoryTag] = set()
        self.version = self.count = 0
        self.sync_seconds: dict[str, float] = {}

    @property
    def share_device(self) -> bool:
        """Whether engines live in the trainer's memory, and so have to take turns with it."""
        return self._placement.shares_memory

    @property
    def dispatcher(self) -> Dispatcher:
        """On rank 0: the way to all engines that answer."""
        assert self._dispatcher is not None, "wait_until_ready() comes first"
        return self._dispatcher

    @property
    def collect_timeout_s(self) -> float:
        """Seconds that the responses of a step may take."""
        return self._config.collect_timeout_s

    @property
    def sync_mode(self) -> Literal["wait", "retract", "in_place"]:
        """What becomes of responses under way when weights come (rollout.asynchronous.weight_sync)."""
        return self._config.sync_mode(self._config.computes_in(self._dtype), current_platform().engines_on_gpu)

    def start(self) -> None:
        """Begin to start this rank's server; wait_until_ready follows once there is nothing better to do."""
        if self._placement.server is not None:
            self._placement.server.start()

    def wait_until_ready(self) -> None:
        """Collective: every server answers when this returns.

        Raises:
            RunFailed: one did not start; its log's cause is named.
            BadInput, TryAgain: an external engine is not there, or not one of ours (take_over_engines).
        """
        addresses = self._placement.wait_for_addresses()
        self.count = len(addresses)
        if dist.get_rank() == 0:
            self._dispatcher = Dispatcher(addresses, self._config, self._stop_token_ids)
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode
        self._sync = ActorSync(self._config, self._dtype, self._fp8, self._placement.transport(), pause)

    def collect(
        self,
        request: GenerationRequest,
        on_done: Callable[[int], None] | None = None,
        on_group: Callable[[list[Sample]], None] | None = None,
    ) -> list[Sample]:
        """On rank 0: see Dispatcher.collect. A request's weight_version is that of the last weight sync, `version`."""
        return self.dispatcher.collect(request, on_done, on_group)

    def update_weights(self, actor: Trainable) -> None:
        """Collective: the engines get the actor's weights, re-sharded, under the next version.

        Raises:
            RunFailed: a name or shape that an engine does not take, or a parameter that was not sent.
        """
        assert self._sync is not None
        self.version += 1
        self.sync_seconds = self._sync.update(actor, self.version)

    def check(
        self, actor: Trainable, sequences: Sequence[Sequence[int]], before_asking: Callable[[], None] = lambda: None
    ) -> LogprobDifference:
        """Collective: the difference of the log-probs that actor and engines give to some sequences.

        before_asking: called when the actor has done its part and before the engines do theirs.

        Raises:
            RunFailed: it is above a tolerance; the tensors that differ are named.
        """
        assert self._sync is not None
        found = self._sync.compare_logprobs(actor, sequences, before_asking)
        if (excess := self._sync.limits.excess(found)) is not None:
            self.offload_kv_cache()
            raise self._sync.explain(actor, excess, self.version)
        return found

    def offload(self) -> None:
        """Collective: the engines give their GPU memory to the trainer."""
        if self.share_device and self._config.memory_saver:
            self._ask_for_memory(EngineClient.release_memory, "kv_cache", "weights")
            self._offloaded = {"kv_cache", "weights"}

    @contextmanager
    def kv_cache_offloaded(self) -> Iterator[None]:
        """Collective: engines give the memory of their KV caches, with what is in them, for a while."""
        gives = self.offload_kv_cache()
        yield
        if gives:
            self.onload("kv_cache")

    def offload_kv_cache(self) -> bool:
        """Collective: engines with a KV cache give it up until onload("kv_cache"). Returns whether they do."""
        gives = self.share_device and self._config.memory_saver and not self._offloaded
        if gives:
            self._ask_for_memory(EngineClient.release_memory, "kv_cache")
            self._offloaded = {"kv_cache"}
        return gives

    def onload(self, tag: MemoryTag) -> None:
        """Collective: the engines take memory again; "weights" before a weight sync, "kv_cache" after it."""
        if tag in self._offloaded:
            self._ask_for_memory(EngineClient.resume_memory, tag)
            self._offloaded.discard(tag)

    def close(self) -> None:
        """End this rank's server and connections."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._sync is not None:
            self._sync.close()
        if self._placement.server is not None:
            self._placement.server.stop()
        self._dispatcher = self._sync = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask_for_memory(
        self, call: Callable[[EngineClient, Sequence[MemoryTag]], Awaitable[None]], *tags: MemoryTag
    ) -> None:
        """Collective: this rank's server gives memory back, or takes it."""
        current_platform().empty_cache()
        if self._placement.server is not None:
            client = EngineClient(self._placement.server.address, self._config.sync.request_timeout_s)

            async def ask() -> None:
                await call(client, tags)
                await client.close()

            asyncio.run(ask())
        dist.barrier()
