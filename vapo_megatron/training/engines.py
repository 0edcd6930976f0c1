"""The engines of a run: asked for responses by rank 0, fed with weights by all."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.experience.sample import Sample
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.client import EngineClient, MemoryTag, PauseMode
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.training.broadcast import broadcast_value
from vapo_megatron.training.placement import EngineReport, EngineSettings, place_engines
from vapo_megatron.weight_sync.actor_sync import ActorSync
from vapo_megatron.weight_sync.logprob_difference import LogprobDifference
from vapo_megatron.weights.fp8 import BlockFp8

T = TypeVar("T")

_POLL_SECONDS = 0.5


class EnginesFailed(TryAgain):
    """The engines of the run failed too often; its own state is whole."""


class Engines:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager.

    Attributes:
        version: of the last weight sync; samples carry it.
        count: of engines.
        failure: why the run cannot go on with its engines; None as long as it can.
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
        home: Path | None = None,
    ) -> None:
        """Collective: decide who owns what; start() follows.

        fp8 is how weights are quantised for the engines, where rollout.quantization asks for it; home: of engines that
        outlive their ranks (rollout.engine_home).

        Raises:
            BadInput: rollout.sync.transport is not possible on this machine.
        """
        self._config, self._dtype, self._fp8, self._stop_token_ids = config, dtype, fp8, stop_token_ids
        self._placement = place_engines(
            EngineSettings(config, model_dir, dtype, log_dir, fp8), current_platform(), home
        )
        self._sync: ActorSync | None = None
        self._dispatcher: Dispatcher | None = None
        self._offloaded: set[MemoryTag] = set()
        self._fed: dict[str, int] = {}  # URLs of those with the weights, and their failures so far
        self._failures: list[str] = []
        self._count = 0
        self._seen: dict[str, int] = {}
        self._sync_again: Callable[[], None] | None = None
        self.version = self.count = 0
        self.failure: EnginesFailed | None = None
        self.sync_seconds: dict[str, float] = {}

    @property
    def share_device(self) -> bool:
        """Whether engines live in the trainer's memory, and so have to take turns with it."""
        return self._placement.shares_memory

    @property
    def taken_over(self) -> bool:
        """Collective: whether an engine was there before this rank, with whatever weights."""
        return any(_gather(self._placement.taken_over))

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
        if self._placement.keeper is not None:
            self._placement.keeper.start()

    def wait_until_ready(self) -> None:
        """Collective: every server answers when this returns.

        Raises:
            RunFailed: one did not start; its log's cause is named.
            BadInput, TryAgain: an external engine is not there, or not one of ours (take_over_engines).
        """
        addresses = self._placement.wait_for_addresses()
        self.count = len(addresses)
        self._fed = {address.url: 0 for address in addresses}
        if dist.get_rank() == 0:
            self._dispatcher = Dispatcher(addresses, self._config, self._stop_token_ids, are_replaced=True)
            self._placement.tell(self._dispatcher.lose)
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

    def update_weights(self, actor: Trainable, again: bool = False) -> None:
        """Collective: the engines get the actor's weights, re-sharded, under the next version.

        Those that are being started again are left out, unless there is no other. `failure` is set where none comes.

        Args:
            actor: whose weights they get.
            again: under the same version: the weights are those that engines had which are gone now.

        Raises:
            RunFailed: a name or shape that an engine does not take, or a parameter that was not sent.
        """
        assert self._sync is not None
        self.version += not again
        while self._wait_for_one():
            self._sync.serve(self._serving())
            self.sync_seconds, lost = self._sync.update(actor, self.version)
            if lost is not None:
                self._placement.fail(lost)
            if self._agree(self._sync.served):
                return
        self._fed = {}

    def check(
        self, actor: Trainable, sequences: Sequence[Sequence[int]], before_asking: Callable[[], None] = lambda: None
    ) -> LogprobDifference:
        """Collective: the difference of the log-probs that actor and engines give to some sequences, the worst of all.

        An engine that is alone with its log-probs is ended and started again, as is one that does not answer.

        before_asking: called when the actor has done its part and before the engines do theirs.

        Raises:
            RunFailed: it is above a tolerance on all of them; the tensors that differ are named.
        """
        assert self._sync is not None
        own, lost = self._sync.compare_logprobs(actor, sequences, before_asking)
        found: dict[str, LogprobDifference] = {}
        for told in _gather(own):
            found |= told
        excess = {url: text for url, one in found.items() if (text := self._sync.limits.excess(one)) is not None}
        if found and len(excess) == len(found):
            self.offload_kv_cache()
            raise self._sync.explain(actor, next(iter(excess.values())), self.version)
        if lost is not None:
            self._placement.fail(lost)
        for url in own.keys() & excess.keys():
            self._placement.fail(f"{url}: its log-probs differ from the trainer's and other engines' {excess[url]}")
        self._agree(own.keys() - excess.keys())
        return LogprobDifference.worst([one for url, one in found.items() if url not in excess])

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Collective: rank 0 asks the engines in here. The others wait, and help where engines need weights anew.

        Raises:
            EnginesFailed: on all ranks, where none is left.
        """
        if dist.get_rank() == 0:
            self.dispatcher.when_stranded = self._call_others if self._sync_again is not None else None
            yield
            self.dispatcher.when_stranded = None
            broadcast_value(False)
        else:
            while broadcast_value(True):
                self._bring_back()
            yield

    def when_stranded(self, sync_again: Callable[[], None]) -> None:
        """Say how engines that have taken the place of others get the weights of `version`; collective."""
        self._sync_again = sync_again

    def _call_others(self) -> None:
        """On rank 0, which is within attended(): no engine is left that has the weights."""
        broadcast_value(True)
        self._bring_back()

    def _bring_back(self) -> None:
        """Collective: engines have the weights of `version` again when this returns."""
        assert self._sync_again is not None
        self._sync_again()
        if self.failure is not None:
            raise self.failure

    @property
    def has_weights(self) -> bool:
        """Whether any engine has the weights of `version`."""
        return bool(self._fed)

    @property
    def serving(self) -> int:
        """How many engines have the weights of `version`."""
        return len(self._fed)

    def take_failures(self) -> list[str]:
        """What engines failed of since the last call, a line each; the same on all ranks, told of at weight syncs."""
        taken, self._failures = self._failures, []
        self._count += len(taken)
        return taken

    def take_count(self) -> int:
        """How many failures were told of since the last call."""
        count, self._count = self._count, 0
        return count

    def offload(self) -> None:
        """Collective: the engines give their GPU memory to the trainer."""
        if self.share_device and self._config.memory_saver:
            self._let_start(False)
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
            self._let_start(False)
            self._ask_for_memory(EngineClient.release_memory, "kv_cache")
            self._offloaded = {"kv_cache"}
        return gives

    def onload(self, tag: MemoryTag) -> None:
        """Collective: the engines take memory again; "weights" before a weight sync, "kv_cache" after it."""
        if tag in self._offloaded:
            self._ask_for_memory(EngineClient.resume_memory, tag)
            self._offloaded.discard(tag)
            self._let_start(not self._offloaded)

    def close(self) -> None:
        """End this rank's server and connections."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._sync is not None:
            self._sync.close()
        self._placement.close()
        self._dispatcher = self._sync = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_start(self, allowed: bool) -> None:
        """An engine that takes the place of another one takes all of its memory: only while the trainer gives it."""
        if self._placement.keeper is not None:
            self._placement.keeper.let_start(allowed)

    def _serving(self) -> dict[str, int]:
        """URLs of the engines that this rank feeds and that answer, and how often each was started again."""
        return {one.url: one.kept.failures for one in self._placement.engines() if one.kept.state == "serving"}

    def _agree(self, fed: Collection[str]) -> set[str]:
        """Collective: which engines have the weights of `version`; fed: of this rank's. Failures are noted."""
        own = self._placement.engines()
        told = _gather([(report, report.url in fed) for report in own])
        reports = [pair for rank in told for pair in rank]
        for report in own:
            if report.url in fed and report.kept.failures == self._fed.get(report.url):
                self._placement.survived(report.url)
        serving = [report for report, is_fed in reports if is_fed and report.kept.state == "serving"]
        self._fed = {report.url: report.kept.failures for report in serving}
        self._note([report for report, _ in reports])
        if self._dispatcher is not None:
            self._dispatcher.use(self._fed)
        return set(self._fed)

    def _note(self, reports: Sequence[EngineReport]) -> None:
        for report in reports:
            self._failures += [report.kept.cause] * (report.kept.failures - self._seen.get(report.url, 0))
            self._seen[report.url] = report.kept.failures
        given_up = [report.kept for report in reports if report.kept.state == "given up"]
        if given_up and (self._placement.needs_all or len(given_up) == len(reports)):
            self.failure = EnginesFailed(
                f"an engine failed {given_up[0].in_a_row} times in a row, the last time {given_up[0].cause} "
                "(rollout.health.max_failures): see its log; start the same command again with run.resume=auto",
                shared=True,
            )

    def _wait_for_one(self) -> bool:
        """Collective: return once an engine answers; False where `failure` says that none will."""
        while self.failure is None:
            reports = [report for rank in _gather(self._placement.engines()) for report in rank]
            self._note(reports)
            if any(report.kept.state == "serving" for report in reports):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _ask_for_memory(
        self, call: Callable[[EngineClient, Sequence[MemoryTag]], Awaitable[None]], *tags: MemoryTag
    ) -> None:
        """Collective: this rank's server gives memory back, or takes it."""
        current_platform().empty_cache()
        keeper = self._placement.keeper
        if keeper is not None and self._serving():
            client = EngineClient(keeper.address, self._config.sync.request_timeout_s)

            async def ask() -> None:
                try:
                    await call(client, tags)
                finally:
                    await client.close()

            try:
                asyncio.run(ask())
            except VapoError as error:
                keeper.fail(str(error))
        dist.barrier()


def _gather(own: T) -> list[T]:
    """Collective: what every rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
