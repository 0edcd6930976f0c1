"""The actor's weights to the engines: the stream of buckets, the session they go through, and the proof afterwards."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist

from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.errors import RunFailed, VapoError
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.client import PauseMode
from vapo_megatron.weight_sync.logprob_difference import Limits, LogprobDifference, Precision, limits_of
from vapo_megatron.weight_sync.probe import probe_batch, split_logprobs
from vapo_megatron.weight_sync.session import EngineLost, WeightSync, some_of
from vapo_megatron.weight_sync.transports import Transport
from vapo_megatron.weights.bucket import DeviceSlots, NamedTensors, SharedSlots
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.part_times import PartTimes


class ActorSync:
    """One rank's part in bringing the actor's weights to the engines and in comparing the two. Collective.

    Args:
        config: the rollout section.
        dtype: model.dtype.
        fp8: how weights are quantised for the engines; None where they are not.
        transport: from this rank to the engines that it feeds; None where it only takes part in the collectives.
        pause: what becomes of responses that run when weights come.
    """

    def __init__(
        self,
        config: RolloutConfig,
        dtype: Dtype,
        fp8: BlockFp8 | None,
        transport: Transport | None,
        pause: PauseMode = "abort",
    ) -> None:
        self._config, self._dtype, self._fp8 = config, dtype, fp8
        self._session = None if transport is None else WeightSync(transport, pause)
        self._slots: DeviceSlots | SharedSlots | None = None

    def serve(self, starts: Mapping[str, int]) -> None:
        """See WeightSync.serve; of the engines that this rank feeds, the others are not there."""
        if self._session is not None:
            self._session.serve(starts)

    @property
    def served(self) -> list[str]:
        """URLs of the engines that this rank feeds."""
        return [] if self._session is None else self._session.served

    def update(self, actor: Trainable, version: int) -> tuple[dict[str, float], str | None]:
        """The engines get the actor's weights, re-sharded, under a version.

        Returns:
            The seconds of each part, and how an engine of this rank's failed; None where none did.

        Raises:
            RunFailed: a name or shape that an engine does not take, or a parameter that was not sent.
        """
        times, lost = PartTimes(), None
        buckets = self._buckets(actor, times)
        try:
            if self._session is not None:
                self._session.load(buckets, version, times)
            else:
                _drain(buckets)
        except EngineLost as error:
            lost = str(error)
        seconds = times.read()
        if isinstance(self._slots, DeviceSlots):  # a device's memory gives way to caches, activations and optimizers
            self._slots.close()
            self._slots = None
            current_platform().release_ipc_memory()
        return seconds, lost

    def compare_logprobs(
        self, actor: Trainable, sequences: Sequence[Sequence[int]], before_asking: Callable[[], None]
    ) -> tuple[dict[str, LogprobDifference], str | None]:
        """The difference of the log-probs that the actor and each engine of this rank's give to some sequences, by URL;
        and how an engine failed to answer, None where none did.

        before_asking: called when the actor has done its part and before the engines do theirs.
        """
        batch = probe_batch(sequences)
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        before_asking()
        if self._session is None or not self._session.owns:
            return {}, None
        try:
            found = self._session.logprob_differences(sequences, ours, self.limits.share)
        except VapoError as error:
            return {}, str(error)
        return dict(zip(self._session.served, found, strict=True)), None

    @property
    def limits(self) -> Limits:
        """How far log-probs may differ, at the precision of the coarser of both sides."""
        coarser: Precision = "bfloat16" if "bfloat16" in (self._dtype, self._config.dtype) else "float32"
        return limits_of(self._config.sync, "fp8" if self._fp8 is not None else coarser)

    def explain(self, actor: Trainable, excess: str, version: int) -> RunFailed:
        """The error to raise where log-probs differ too much (excess: in words). It names the tensors that differ."""
        lines: list[str] = []
        if self._session is not None:
            lines = self._session.differing_tensors(self._buckets(actor, PartTimes()))
        else:
            _drain(self._buckets(actor, PartTimes()))
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, lines)
        named = list(dict.fromkeys(itertools.chain.from_iterable(gathered)))
        return RunFailed(
            f"log-probs of engine and trainer differ after the weight sync of version {version} {excess}: "
            f"{some_of(named) or 'every tensor is equal, so the two compute differently'}"
        )

    def close(self) -> None:
        """Close connections and give the buckets' memory back."""
        if self._session is not None:
            self._session.close()
        if self._slots is not None:
            self._slots.close()
        self._session = self._slots = None

    def _buckets(self, actor: Trainable, times: PartTimes) -> Iterator[NamedTensors]:
        if self._slots is None:
            self._slots = make_slots(actor.mesh, current_platform().device)
        limit = self._config.sync.bucket_mib << 20
        stream = stream_hf(actor.chunks, actor.spec, actor.mesh, "lm", limit, slots=self._slots, times=times)
        # Ranks that feed no engine take part in the stream's collectives alone.
        return stream if self._fp8 is None or self._session is None else self._fp8.convert(stream)


def _drain(buckets: Iterator[NamedTensors]) -> None:
    for _ in buckets:
        pass
