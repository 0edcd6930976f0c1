"""The engines of a run: rank 0 asks them for responses, all ranks send them weights."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from vapo_megatron import logs
from vapo_megatron.collectives import broadcast_value, gather_values
from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.keeper import Kept
from vapo_megatron.engines.placement import Placement
from vapo_megatron.engines.server.client import EngineClient, MemoryTag, PauseMode
from vapo_megatron.engines.weight_sync.logprob_difference import (
    Limits,
    LogprobDifference,
    Warned,
    limits_of,
    probe_batch,
    split_logprobs,
)
from vapo_megatron.engines.weight_sync.session import EngineLost, WeightSync, some_of
from vapo_megatron.errors import RunFailed, TryAgain, VapoError
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.signals import first_signal, stop_requested
from vapo_megatron.weights.bucket import DeviceSlots, NamedTensors, SharedSlots
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.gather import PartTimes
from vapo_megatron.weights.spec import read_spec

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class EnginesFailed(TryAgain):
    """The engines of the run failed too often; its own state is whole."""


class Engines:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager.

    Attributes:
        version: number of the last weight sync; samples carry it.
        count: number of engines.
        failure: why the run cannot go on with its engines; None as long as it can.
        sync_seconds: seconds of the last weight sync, by part.
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
        """Collective: decide which rank owns which engine; start() follows.

        fp8: how weights are quantised for the engines (rollout.quantization); None: not at all.

        Raises:
            BadInput: rollout.sync.transport is not possible on this machine.
        """
        self._config, self._dtype, self._fp8, self._stop_token_ids = config, dtype, fp8, stop_token_ids
        self._vocabulary = read_spec(model_dir).vocab_size
        self._placement = Placement(config, model_dir, dtype, log_dir, current_platform(), fp8)
        self._sync: WeightSync | None = None
        self._slots: DeviceSlots | SharedSlots | None = None
        self._dispatcher: Dispatcher | None = None
        self._offloaded: set[MemoryTag] = set()
        self._warned = Warned()  # of the log-probs of all engines
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
        """Whether engines share the trainer's device memory, so that the two take turns."""
        return self._placement.shares_memory

    @property
    def dispatcher(self) -> Dispatcher:
        """On rank 0: the client of all engines."""
        assert self._dispatcher is not None, "wait_until_ready() comes first"
        return self._dispatcher

    @property
    def collect_timeout_s(self) -> float:
        """Time limit of the responses of a step, in seconds."""
        return self._config.collect_timeout_s

    @property
    def sync_mode(self) -> Literal["wait", "retract", "in_place"]:
        """What happens to running responses at a weight sync (rollout.asynchronous.weight_sync)."""
        return self._config.sync_mode(self._dtype, current_platform().is_cuda)

    @property
    def write_old_groups(self) -> bool:
        """Whether groups that are running at a weight sync are finished under the old weights."""
        return self._config.asynchronous.max_staleness > 0 and self.sync_mode == "wait"

    def start(self) -> None:
        """Begin to start this rank's server; wait_until_ready() follows once other work is done."""
        if self._placement.keeper is not None:
            self._placement.keeper.start()

    def wait_until_ready(self) -> None:
        """Collective: return once every server answers.

        Raises:
            RunFailed: a server did not start; the message quotes the cause from its log.
            BadInput, TryAgain: an external engine does not answer, or does not fit this run (take_over_engines).
        """
        addresses = self._placement.wait_for_addresses()
        self.count = len(addresses)
        self._fed = {address.url: 0 for address in addresses}
        if dist.get_rank() == 0:
            self._dispatcher = Dispatcher(
                addresses, self._config, self._stop_token_ids, are_replaced=True, vocabulary=self._vocabulary
            )
            self._placement.tell(self._dispatcher.lose)
        pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode
        self._sync = WeightSync(self._placement.transport(), pause)

    def update_weights(self, actor: Trainable, again: bool = False) -> None:
        """Collective: send the actor's weights to the engines, re-sharded, under the next version.

        Engines that are starting again are left out, unless no other serves. `failure` is set if none comes back.

        Args:
            actor: the model whose weights are sent.
            again: keep the version: engines that were replaced get the weights that the lost ones had.

        Raises:
            RunFailed: an engine does not know a name or shape, or a parameter was not sent.
        """
        assert self._sync is not None
        self.version += not again
        while self._wait_for_one():
            self._sync.serve(self._serving())
            times = PartTimes()
            try:
                self._sync.load(self._buckets(actor, times), self.version, times)
            except EngineLost as error:
                self._placement.fail(str(error))
            self.sync_seconds = times.seconds
            if isinstance(self._slots, DeviceSlots):  # a device's memory gives way to caches and optimizers
                self._slots.close()
                current_platform().release_ipc_memory()
            if self._agree(self._sync.served, survives=not again):
                return
        self._fed = {}

    def check(
        self, actor: Trainable, sequences: Sequence[Sequence[int]], before_asking: Callable[[], None] = lambda: None
    ) -> LogprobDifference:
        """Collective: the largest difference between the log-probs of the actor and of any engine on some sequences.

        An engine that alone differs too much is ended and started again, as is one that does not answer.

        before_asking: called after the actor's part and before the engines'.

        Raises:
            RunFailed: all engines differ by more than a tolerance; the message names the tensors that differ.
        """
        assert self._sync is not None
        limits, batch = self.limits, probe_batch(sequences)
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        before_asking()
        mine: dict[str, LogprobDifference] = {}
        lost: VapoError | None = None
        try:
            mine = self._sync.logprob_differences(sequences, ours, limits.share)
        except VapoError as error:
            lost = error
        gaps = {url: gap for rank in gather_values(mine) for url, gap in rank.items()}
        excess = {url: text for url, gap in gaps.items() if (text := limits.excess(gap)) is not None}
        if gaps and len(excess) == len(gaps):
            self.offload_kv_cache()
            self._refuse_or_warn(actor, next(iter(excess.values())), LogprobDifference.worst(list(gaps.values())))
            before_asking()
            excess = {}
        else:
            self._warned.growth(0.0, self.limits.mean)
        if lost is not None:
            self._placement.fail(str(lost))
        for url in mine.keys() & excess.keys():
            cause = f"{url}: its log-probs differ from the trainer's and other engines' {excess[url]}"
            self._placement.fail(cause, served=False)
        self._agree(mine.keys() - excess.keys(), survives=False)
        return LogprobDifference.worst([gap for url, gap in gaps.items() if url not in excess])

    @property
    def limits(self) -> Limits:
        """Limits of the log-prob differences, by the coarser precision of trainer and engine."""
        if self._fp8 is not None:
            return limits_of(self._config.sync, "fp8")
        return limits_of(self._config.sync, self._dtype)

    def _refuse_or_warn(self, actor: Trainable, excess: str, difference: LogprobDifference) -> None:
        """Collective: fail or warn because log-probs differ too much on all engines (excess: by how much, in words).

        It is a warning if every tensor is equal and the limit is an estimate: kernels may round differently by more.

        Raises:
            RunFailed: tensors differ, the limit is not an estimate, or the difference grows.
        """
        assert self._sync is not None
        lines = gather_values(self._sync.differing_tensors(self._buckets(actor, PartTimes())))
        named = list(dict.fromkeys(itertools.chain.from_iterable(lines)))
        if named or not self.limits.are_estimates or not math.isfinite(difference.largest):
            raise RunFailed(
                f"log-probs of engine and trainer differ after the weight sync of version {self.version} {excess}: "
                f"{some_of(named) or 'every tensor is equal, so the two compute differently'}"
            )
        if growth := self._warned.growth(difference.mean, self.limits.mean):
            raise RunFailed(
                f"log-probs of engine and trainer differ more and more, though every tensor is equal: {growth}: no "
                "rounding does that, look for what the two compute differently, or allow it by rollout.sync.tolerance"
            )
        if dist.get_rank() == 0:
            _logger.warning(
                "log-probs of engine and trainer differ %s, though every tensor is equal: their kernels round "
                "differently, set rollout.sync.tolerance to what is normal there",
                excess,
            )

    def _buckets(self, actor: Trainable, times: PartTimes) -> Iterator[NamedTensors]:
        """Collective while it is iterated: the actor's weights in the form that this rank's engines take."""
        assert self._sync is not None
        self._slots = self._slots or make_slots(current_platform().device)
        limit = self._config.sync.bucket_mib << 20
        stream = stream_hf(actor.chunks, actor.spec, actor.mesh, "lm", limit, self._slots, times)
        return self._fp8.convert(stream) if self._fp8 is not None and self._sync.sends else stream

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Collective: rank 0 uses the engines in here. The others wait, and help to send weights again if needed.

        Raises:
            EnginesFailed: on all ranks, if no engine is left.
        """
        if dist.get_rank() == 0:
            self.dispatcher.when_stranded = self._bring_back if self._sync_again is not None else None
            yield
            self.dispatcher.when_stranded = None
            broadcast_value(False)
        else:
            logs.set_phase(logs.ATTENDING)
            while broadcast_value(True):
                self._bring_back()
                logs.set_phase(logs.ATTENDING)
            logs.set_phase(None)
            yield

    def when_stranded(self, sync_again: Callable[[], None]) -> None:
        """Set the collective call that sends the weights of `version` to engines that replaced others."""
        self._sync_again = sync_again

    def _bring_back(self) -> None:
        """Collective, within attended(): engines have the weights of `version` again when this returns."""
        assert self._sync_again is not None
        if dist.get_rank() == 0:  # the others wait to be called
            broadcast_value(True)
        self._sync_again()
        if self.failure is not None:
            raise self.failure

    @property
    def serving(self) -> int:
        """How many engines have the weights of `version`."""
        return len(self._fed)

    def take_failures(self) -> list[str]:
        """Causes of the engine failures since the last call, the same on all ranks; noted at weight syncs."""
        taken, self._failures = self._failures, []
        self._count += len(taken)
        return taken

    def take_count(self) -> int:
        """How many failures take_failures() returned since the last call."""
        count, self._count = self._count, 0
        return count

    def offload(self) -> None:
        """Collective: the engines give back their GPU memory."""
        self._give("kv_cache", "weights")

    @contextmanager
    def kv_cache_offloaded(self) -> Iterator[None]:
        """Collective: the engines give up their KV caches and their memory in here."""
        gives = self.offload_kv_cache()
        yield
        if gives:
            self.onload("kv_cache")

    def offload_kv_cache(self) -> bool:
        """Collective: the engines give up their KV caches until onload("kv_cache"). Returns whether they had any."""
        return not self._offloaded and self._give("kv_cache")

    def _give(self, *tags: MemoryTag) -> bool:
        if self.share_device:
            self._placement.let_start(False)
            self._placement.ask_for_memory(EngineClient.release_memory, tags)
            self._offloaded = set(tags)
        return self.share_device

    def onload(self, tag: MemoryTag) -> None:
        """Collective: the engines take memory again; "weights" before a weight sync, "kv_cache" after it."""
        if tag in self._offloaded:
            self._placement.ask_for_memory(EngineClient.resume_memory, [tag])
            self._offloaded.discard(tag)
            self._placement.let_start(not self._offloaded)

    def close(self) -> None:
        """End this rank's server and connections."""
        self._placement.tell(lambda _: None)  # an engine that fails from now on has no work to give back
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._sync is not None:
            self._sync.close()
        if self._slots is not None:
            self._slots.close()
        self._placement.close()
        self._dispatcher = self._sync = self._slots = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serving(self) -> dict[str, int]:
        """URLs of the engines that this rank feeds and that serve, with the number of failures of each."""
        return {kept.url: kept.failures for kept in self._placement.engines() if kept.state == "serving"}

    def _agree(self, fed: Collection[str], survives: bool) -> set[str]:
        """Collective: which engines have the weights of `version`, and which failed. fed: those of this rank.

        survives: whether engines that had the weights before have served from one weight sync to the next.
        """
        mine = self._placement.engines()
        ranks = gather_values([(kept, kept.url in fed) for kept in mine])
        pairs = [pair for rank in ranks for pair in rank]
        for kept in mine:
            if survives and kept.url in fed and kept.failures == self._fed.get(kept.url):
                self._placement.survived(kept.url)
        self._fed = {kept.url: kept.failures for kept, is_fed in pairs if is_fed and kept.state == "serving"}
        self._note([kept for kept, _ in pairs])
        if self._dispatcher is not None:
            self._dispatcher.use(self._fed)
        return set(self._fed)

    def _note(self, engines: Sequence[Kept]) -> None:
        for kept in engines:
            self._failures += [kept.cause] * (kept.failures - self._seen.get(kept.url, 0))
            self._seen[kept.url] = kept.failures
        given_up = [kept for kept in engines if kept.state == "given up"]
        if given_up and (not self._placement.is_external or len(given_up) == len(engines)):
            self.failure = EnginesFailed(
                f"an engine failed {given_up[0].in_a_row} times in a row, the last time {given_up[0].cause} "
                "(rollout.health.max_failures): see its log; start the same command again with run.resume=auto",
                shared=True,
            )

    def _wait_for_one(self) -> bool:
        """Collective: wait until an engine serves; False if none will, as `failure` says."""
        while self.failure is None:
            ranks = gather_values((self._placement.engines(), stop_requested()))
            engines = [engine for rank, _ in ranks for engine in rank]
            self._note(engines)
            if any(engine.state == "serving" for engine in engines):
                return True
            if reason := first_signal([name for _, name in ranks]):
                self.failure = EnginesFailed(
                    f"{reason} came while no engine served, the last step is saved: start the same command again "
                    "with run.resume=auto",
                    shared=True,
                )
            time.sleep(_POLL_SECONDS)
        return False
