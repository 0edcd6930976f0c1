"""The weights in the engines: all ranks send the actor's, and compare what both compute with
them."""

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import torch.distributed as dist

from vapo_megatron.collectives import gather_values
from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.server.client import PauseMode
from vapo_megatron.engines.weight_sync.logprob_difference import (
    DifferenceTrend,
    Limits,
    LogprobDifference,
    limits_for,
    probe_batch,
    split_logprobs,
)
from vapo_megatron.engines.weight_sync.own_shares import OwnShares
from vapo_megatron.engines.weight_sync.session import EngineLost, WeightSync, shorten
from vapo_megatron.errors import RunFailed, VapoError
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.bucket import DeviceSlots, NamedTensors, SharedSlots
from vapo_megatron.weights.export import make_slots, stream_hf, stream_masks
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.gather import PartTimes

_logger = logging.getLogger(__name__)
# Two buckets, and tensors gathered or quantised for them.
_ROOM = 4


class EngineWeights:
    """The weights in a run's engines. A context manager, entered inside the pool's.

    Attributes:
        version: number of the last weight sync; samples carry it.
        sync_seconds: seconds of the last weight sync, by part.
        sent_share: bytes that it sent, as a share of the weights'; None: it sent them whole.
    """

    def __init__(
        self, pool: EnginePool, config: RolloutConfig, dtype: Dtype, fp8: BlockFp8 | None = None
    ) -> None:
        """
        Args:
            pool: the run's engines; they need not be ready yet.
            config: the rollout section.
            dtype: model.dtype.
            fp8: how weights are quantised for the engines (rollout.quantization); None: not at all.
        """
        self._pool = pool
        self._config = config
        self._dtype = dtype
        self._fp8 = fp8
        self._session: WeightSync | None = None
        self._slots: DeviceSlots | SharedSlots | None = None
        self._bucket_bytes: int | None = None
        self._trend = DifferenceTrend()
        self._own_shares = OwnShares()
        self._pairs: bool | None = None
        self.version = 0
        self.sync_seconds: dict[str, float] = {}
        self.sent_share: float | None = None

    @property
    def sync_mode(self) -> Literal["wait", "retract", "in_place"]:
        """What a weight sync does to running responses (rollout.asynchronous.weight_sync)."""
        return self._config.sync_mode(self._dtype, current_platform().is_cuda)

    @property
    def finishes_old_groups(self) -> bool:
        """Whether groups that are running at a weight sync are finished with the old weights."""
        return self._config.asynchronous.max_staleness > 0 and self.sync_mode == "wait"

    @property
    def limits(self) -> Limits:
        """Limits of the log-prob differences, by the coarser precision of trainer and engine."""
        return limits_for(self._config.sync, self._dtype if self._fp8 is None else "fp8")

    @property
    def session(self) -> WeightSync:
        """The connection that weights are sent over, opened once the engines are ready."""
        if self._session is None:
            pause: PauseMode = "abort" if self.sync_mode == "wait" else self.sync_mode
            self._session = WeightSync(self._pool.transport(), pause)
        return self._session

    def update_weights(self, actor: Trainable, again: bool = False) -> None:
        """Collective: send the actor's weights to the engines, resharded, under the next version.

        Engines that are restarting are left out, unless no other engine serves. The pool's
        `failure` is set if none comes back. None has the weights, and `failure` is not set, if none
        can start before EnginePool.wait_for_restart.

        Args:
            actor: the model whose weights are sent.
            again: keep the version: restarted engines get the weights that they had before.

        Raises:
            RunFailed: an engine does not know a name or shape, or a parameter was not sent.
        """
        version = self.version if again else self.version + 1
        while self._pool.wait_for_one():
            served = self._pool.serving_here()
            self.session.serve(served)
            times = PartTimes()
            is_loaded = self._load(actor, version, times, served)
            # Device memory is needed for KV caches and optimizers between syncs.
            if isinstance(self._slots, DeviceSlots):
                self._slots.close()
                current_platform().release_ipc_memory()
            if not is_loaded:
                continue
            self.sync_seconds = times.seconds
            self.sent_share = self.session.sent_share
            if self._pool.admit(self.session.served, survived=not again):
                break
        else:
            self._pool.remove_all()
        # Not earlier: a group drawn meanwhile may have first tokens of the weights before.
        self.version = version

    def _load(
        self, actor: Trainable, version: int, times: PartTimes, served: Mapping[str, int]
    ) -> bool:
        """Collective: send the weights to the engines that are served. An engine that fails is
        killed and restarted. False: one of them needs whole tensors, and is sent these next."""
        own = self._own_shares_of(actor)
        limit = self._bucket_limit()
        if own is not None:
            own.begin((tuple(sorted(served.items())), limit))
        buckets = self._buckets(actor, limit, times, own.buckets if own else ())
        asks = own is not None and own.is_due
        is_loaded = True
        try:
            masks = self._masks(actor, limit) if asks else ()
            is_loaded = self.session.load(buckets, version, times, masks)
        except EngineLost as error:
            self._pool.fail(str(error))
        if own is None:
            return True
        if own.buckets and not all(gather_values(is_loaded)):
            own.forget()
            return False
        own.loaded()
        if asks:
            own.accept(self.session.own_buckets)
        return True

    def _own_shares_of(self, actor: Trainable) -> OwnShares | None:
        """Collective at the first call: None where every rank of an engine is sent whole
        tensors."""
        if self._pairs is None:
            ranks = actor.mesh.pg.tp
            can_pair = (
                self._config.sync.gather == "auto"
                and self._fp8 is None
                and ranks.size() == self._config.tp > 1
                and self.session.pair_with(ranks)
            )
            self._pairs = all(gather_values(can_pair))
        return self._own_shares if self._pairs else None

    def _masks(self, actor: Trainable, limit: int) -> Iterator[NamedTensors]:
        """Collective while it is iterated: the masks of this rank's own shares in _buckets()."""
        assert self._slots is not None
        return stream_masks(actor.chunks, actor.spec, actor.mesh, "lm", limit, self._slots)

    def check(
        self,
        actor: Trainable,
        sequences: Sequence[Sequence[int]],
        before_asking: Callable[[], None] = lambda: None,
    ) -> LogprobDifference:
        """Collective: the largest difference between the log-probs of the actor and of any engine.

        An engine that does not answer, or that alone differs too much, is killed and restarted.

        Args:
            actor: the model whose weights the engines have.
            sequences: token ids of the probe.
            before_asking: called after the actor's part and before the engines'.

        Raises:
            RunFailed: all engines differ by more than a tolerance; the message names the tensors
                that differ.
        """
        limits = self.limits
        batch = probe_batch(sequences)
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        before_asking()
        differences_here: dict[str, LogprobDifference] = {}
        lost: VapoError | None = None
        try:
            differences_here = self.session.logprob_differences(sequences, ours, limits.share)
        except VapoError as error:
            lost = error
        differences = {
            url: difference
            for rank in gather_values(differences_here)
            for url, difference in rank.items()
        }
        excess = _excess(limits, differences)
        if differences and len(excess) == len(differences):
            self._pool.offload_kv_cache()
            worst = LogprobDifference.worst(list(differences.values()))
            self._refuse_or_warn(actor, next(iter(excess.values())), worst)
            before_asking()
            excess = {}
            served = self.session.served  # none of this rank's, where one of them was lost
            differences_here = {
                url: difference for url, difference in differences_here.items() if url in served
            }
        else:
            self._trend.growth(0.0, limits.mean)
        if lost is not None:
            self._pool.fail(str(lost))
        for url in differences_here.keys() & excess.keys():
            self._pool.fail(
                f"{url}: its log-probs differ from the trainer's and other engines' {excess[url]}",
                served=False,
            )
        self._pool.admit(differences_here.keys() - excess.keys(), survived=False)
        accepted = [difference for url, difference in differences.items() if url not in excess]
        return LogprobDifference.worst(accepted)

    def _refuse_or_warn(self, actor: Trainable, excess: str, difference: LogprobDifference) -> None:
        """Collective: fail or warn because log-probs differ too much on all engines.

        It is a warning if every tensor is equal and the limit is an estimate: kernels may round
        differently by more than the estimate. An engine that fails meanwhile is killed and
        restarted; if none is left to compare with, the next check decides.

        Args:
            actor: the model whose weights the engines have.
            excess: which limit is exceeded, in words.
            difference: the worst of all engines.

        Raises:
            RunFailed: tensors differ, the limit is not an estimate, or the difference grows.
        """
        problems: list[str] = []
        try:
            buckets = self._buckets(actor, self._bucket_limit(), PartTimes())
            problems = self.session.differing_tensors(buckets)
        except EngineLost as error:
            self._pool.fail(str(error))
        ranks = gather_values((problems, bool(self.session.served)))
        if not any(is_compared for _, is_compared in ranks):
            return
        differing = list(dict.fromkeys(itertools.chain.from_iterable(lines for lines, _ in ranks)))
        limits = self.limits
        if differing or not limits.are_estimates or not math.isfinite(difference.largest):
            cause = shorten(differing) or "every tensor is equal, so the two compute differently"
            raise RunFailed(
                f"log-probs of engine and trainer differ after the weight sync of version "
                f"{self.version} {excess}: {cause}"
            )
        if growth := self._trend.growth(difference.mean, limits.mean):
            raise RunFailed(
                "the difference between log-probs of engine and trainer keeps growing although "
                f"every tensor is equal: {growth}. Rounding does not grow: find out what the two "
                "compute differently, or allow the difference with rollout.sync.tolerance"
            )
        if dist.get_rank() == 0:
            _logger.warning(
                "log-probs of engine and trainer differ %s, although every tensor is equal: their "
                "kernels round differently. Set rollout.sync.tolerance to a value normal for this "
                "model",
                excess,
            )

    def _buckets(
        self, actor: Trainable, limit: int, times: PartTimes, own_shares: Collection[int] = ()
    ) -> Iterator[NamedTensors]:
        """Collective while it is iterated: the actor's weights in the form that engines take.
        limit: bytes of a bucket. own_shares: see stream_hf."""
        if self._slots is None:
            self._slots = make_slots(current_platform().device)
        stream = stream_hf(
            actor.chunks, actor.spec, actor.mesh, "lm", limit, self._slots, times, own_shares
        )
        if self._fp8 is not None and self.session.sends:
            return self._fp8.convert(stream)
        return stream

    def _bucket_limit(self) -> int:
        """Collective: bytes of a bucket, the same on all ranks. A size is kept as long as there is
        room for it, as engines learn where the tensors of each bucket go."""
        platform = current_platform()
        free = 0
        if platform.is_cuda and not self._config.external_urls:
            # A full GPU is no machine without GPUs, which 0 stands for.
            free = max(1, min(gather_values(platform.free_bytes())))
        limit = self._config.sync.bucket_bytes(free)
        kept = self._bucket_bytes
        if kept is None or (limit < kept and free < _ROOM * kept):
            self._bucket_bytes = kept = limit
        return kept

    def close(self) -> None:
        """Close the connections and release the memory of buckets."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def __enter__(self) -> "EngineWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _excess(limits: Limits, differences: dict[str, LogprobDifference]) -> dict[str, str]:
    """Which limit each engine exceeds, in words, by URL; engines within all limits are left out."""
    excess = {url: limits.excess(difference) for url, difference in differences.items()}
    return {url: text for url, text in excess.items() if text is not None}
