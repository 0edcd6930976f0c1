"""The engines of a run: which of them serve, which failed, and whose memory they use."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch.distributed as dist

from vapo_megatron import logs
from vapo_megatron.collectives import broadcast_value, gather_values
from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.keeper import EngineStatus
from vapo_megatron.engines.placement import Placement
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, MemoryTag
from vapo_megatron.engines.weight_sync.transports import Transport
from vapo_megatron.errors import TryAgain
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.signals import first_signal, stop_requested
from vapo_megatron.weights.fp8 import BlockFp8

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5

# What rank 0 tells the ranks that wait while it uses the engines.
_Message = Literal["wait", "resync", "done"]
# A collective fails after its time limit: rank 0 calls the waiting ranks this many times within it.
_CALLS_PER_LIMIT = 4


class EnginesFailed(TryAgain):
    """The run's engines failed too often. The run's own state is intact."""


class EngineUser(Protocol):
    """What gives the engines work on rank 0 (rollout/dispatcher.py), as the pool sees it.

    Attributes:
        on_wait: called repeatedly by the thread that waits for responses.
        on_no_engine_left: called repeatedly by that thread while no engine is left.
    """

    on_wait: Callable[[], None] | None
    on_no_engine_left: Callable[[], None] | None

    def lose(self, url: str) -> None:
        """The engine at this URL failed: give it no more work."""

    def use(self, urls: Collection[str]) -> None:
        """Give work only to the engines at these URLs, which have the current weights."""

    def close(self) -> None:
        """Cancel running requests and close all connections."""


class EnginePool:
    """All SGLang servers of a run, as one rank sees them. Use as a context manager.

    Attributes:
        addresses: addresses of all engines; empty before wait_until_ready().
        failure: why the run cannot continue with its engines; None while it can.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_dir: Path,
        dtype: Dtype,
        log_dir: Path,
        fp8: BlockFp8 | None = None,
    ) -> None:
        """Collective: decide which rank owns which engine. start() follows.

        Args:
            config: the rollout section.
            model_dir: Hugging Face directory that the engines load.
            dtype: model.dtype.
            log_dir: directory of the engines' logs.
            fp8: how weights are quantised for the engines (rollout.quantization); None: not at all.

        Raises:
            BadInput: this machine does not support rollout.sync.transport.
        """
        self._config = config
        self._placement = Placement(config, model_dir, dtype, log_dir, current_platform(), fp8)
        self._user: EngineUser | None = None
        self._resync: Callable[[], None] | None = None
        self._called_at = 0.0
        self._released: set[MemoryTag] = set()
        # Failures of each engine in rotation when it joined, by URL: an engine whose number has
        # grown was restarted since and has lost the weights.
        self._in_rotation: dict[str, int] = {}
        self._causes: list[str] = []
        self._noted_failures: dict[str, int] = {}
        self.addresses: list[EngineAddress] = []
        self.failure: EnginesFailed | None = None

    @property
    def share_device(self) -> bool:
        """Whether engines and trainer use the same device memory and take turns."""
        return self._placement.shares_memory

    @property
    def count(self) -> int:
        """Number of engines, failed ones included."""
        return len(self.addresses)

    @property
    def serving(self) -> int:
        """Number of engines that have the current weights."""
        return len(self._in_rotation)

    @property
    def collect_timeout_s(self) -> float:
        """rollout.collect_timeout_s: seconds without progress after which a collection fails."""
        return self._config.collect_timeout_s

    def start(self) -> None:
        """Start this rank's server and return at once. wait_until_ready() follows."""
        if self._placement.keeper is not None:
            self._placement.keeper.start()

    def wait_until_ready(self) -> None:
        """Collective: return once every server answers.

        Raises:
            RunFailed: a server did not start; the message quotes the cause from its log.
            BadInput, TryAgain: an external engine does not answer or does not fit this run
                (take_over_engines).
        """
        self.addresses = self._placement.wait_for_addresses()
        self._in_rotation = {address.url: 0 for address in self.addresses}

    def attach(self, user: EngineUser) -> None:
        """On rank 0, once the engines are ready: tell this user which engines failed and which
        serve. It is closed with the pool."""
        self._user = user
        self._placement.on_lost(user.lose)

    def transport(self) -> Transport:
        """This rank's transport to the engines that it feeds, once they are ready."""
        return self._placement.transport()

    @contextmanager
    def rank0_uses_engines(self) -> Iterator[None]:
        """Collective: rank 0 uses the engines inside this context. The other ranks wait, and help
        to send the weights again if every engine had to be restarted.

        Raises:
            EnginesFailed: on all ranks, if no engine is left.
        """
        if dist.get_rank() == 0:
            assert self._user is not None, "attach() comes first"
            self._called_at = time.monotonic()
            self._user.on_wait = self._keep_ranks_waiting
            if self._resync is not None:
                self._user.on_no_engine_left = self._resync_weights
            yield
            self._user.on_wait = None
            self._user.on_no_engine_left = None
            self._call_ranks("done")
        else:
            logs.set_phase(logs.ATTENDING)
            while (message := self._call_ranks("done")) != "done":
                if message == "resync":
                    self._resync_weights()
                    logs.set_phase(logs.ATTENDING)
            logs.set_phase(None)
            yield

    def on_no_engine_left(self, resync: Callable[[], None]) -> None:
        """Set the collective call that sends the current weights to restarted engines."""
        self._resync = resync

    def _resync_weights(self) -> None:
        """Collective, within rank0_uses_engines(): engines have the current weights afterwards."""
        assert self._resync is not None
        if dist.get_rank() == 0:
            self._call_ranks("resync")
        self._resync()
        if self.failure is not None:
            raise self.failure

    def _keep_ranks_waiting(self) -> None:
        """On rank 0: keep the other ranks' wait within the time limit of a collective, however long
        responses take."""
        limit = world_timeout().total_seconds()
        if time.monotonic() - self._called_at > limit / _CALLS_PER_LIMIT:
            self._call_ranks("wait")

    def _call_ranks(self, message: _Message) -> _Message:
        """Collective: rank 0's message."""
        message = broadcast_value(message)
        self._called_at = time.monotonic()
        return message

    def pop_failures(self) -> list[str]:
        """Causes of the engine failures since the last call, the same on all ranks.

        Failures are noted at weight syncs.
        """
        causes = self._causes
        self._causes = []
        return causes

    def fail(self, cause: str, served: bool = True) -> None:
        """Kill and restart the faulty ones among this rank's engines (Placement.fail)."""
        self._placement.fail(cause, served)

    def serving_here(self) -> dict[str, int]:
        """Engines that this rank feeds and that serve: their number of failures, by URL."""
        return {
            engine.url: engine.failures
            for engine in self._placement.engines()
            if engine.state == "serving"
        }

    def admit(self, urls: Collection[str], survived: bool) -> int:
        """Collective: put exactly the engines that have the current weights into rotation.

        Args:
            urls: addresses of this rank's engines that have the weights.
            survived: whether engines that were in rotation before have served from one weight sync
                to the next, so that their earlier failures no longer count.

        Returns:
            Number of engines in rotation.
        """
        engines_here = self._placement.engines()
        ranks = gather_values([(engine, engine.url in urls) for engine in engines_here])
        everywhere = [pair for rank in ranks for pair in rank]
        for engine in engines_here:
            is_unbroken = engine.failures == self._in_rotation.get(engine.url)
            if survived and engine.url in urls and is_unbroken:
                self._placement.survived(engine.url)
        self._in_rotation = {
            engine.url: engine.failures
            for engine, has_weights in everywhere
            if has_weights and engine.state == "serving"
        }
        self._note([engine for engine, _ in everywhere])
        if self._user is not None:
            self._user.use(self._in_rotation)
        return self.serving

    def remove_all(self) -> None:
        """Take all engines out of rotation, after none was left to send weights to."""
        self._in_rotation = {}

    def wait_for_restart(self, make_room: Callable[[], None]) -> None:
        """Collective, before a weight sync: where engines share the trainer's device and none of
        them serves, wait until one does. None could start beside the trainer's weights.

        Args:
            make_room: collective: the trainer's models leave the device.
        """
        ranks = gather_values(self._placement.engines()) if self.share_device else []
        if not ranks or any(engine.state == "serving" for rank in ranks for engine in rank):
            return
        make_room()
        broadcast_value(None)  # the GPUs of an engine are several ranks'
        self._released.clear()
        self._placement.let_start(True)
        self.wait_for_one()

    def wait_for_one(self) -> bool:
        """Collective: wait until an engine serves. False if none ever will (see `failure`), or if
        none does and the trainer has the memory that one needs to start (wait_for_restart)."""
        while self.failure is None:
            ranks = gather_values((self._placement.engines(), stop_requested()))
            engines = [engine for rank, _ in ranks for engine in rank]
            self._note(engines)
            if any(engine.state == "serving" for engine in engines):
                return True
            if reason := first_signal([name for _, name in ranks]):
                self.failure = EnginesFailed(
                    f"{reason} arrived while no engine was serving; the last step is saved: "
                    "start the same command again with run.resume=auto",
                    shared=True,
                )
            if self._released:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def _note(self, engines: Sequence[EngineStatus]) -> None:
        """Note new failures of all ranks' engines, and whether too many of them are given up."""
        for engine in engines:
            new_failures = engine.failures - self._noted_failures.get(engine.url, 0)
            self._causes += [engine.cause] * new_failures
            self._noted_failures[engine.url] = engine.failures
        given_up = [engine for engine in engines if engine.state == "given up"]
        if given_up and (not self._placement.is_external or len(given_up) == len(engines)):
            first = given_up[0]
            self.failure = EnginesFailed(
                f"an engine failed {first.in_a_row} times in a row (limit "
                f"rollout.health.max_failures), most recently: {first.cause}. See its log; start "
                "the same command again with run.resume=auto",
                shared=True,
            )

    def offload(self) -> None:
        """Collective: the engines release their GPU memory, at the end of a rollout.

        A start that was interrupted before is waited for: an engine that takes longer to start than
        a rollout lasts would never serve again.
        """
        if self.share_device and not self._released:
            self._wait_for_interrupted_starts()
        self._release("kv_cache", "weights")

    def _wait_for_interrupted_starts(self) -> None:
        """Collective: until they serve or have failed, or a signal asks the run to stop."""
        while True:
            ranks = gather_values((self._placement.engines(), stop_requested()))
            is_pending = any(
                engine.interrupted and engine.state in ("starting", "waiting")
                for engines, _ in ranks
                for engine in engines
            )
            if not is_pending or first_signal([name for _, name in ranks]):
                return
            logs.note_progress()  # for the watchdog: keepers bound the wait
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def kv_cache_offloaded(self) -> Iterator[None]:
        """Collective: the engines' KV caches are released inside this context."""
        released = self.offload_kv_cache()
        yield
        if released:
            self.onload("kv_cache")

    def offload_kv_cache(self) -> bool:
        """Collective: the engines release their KV caches until onload("kv_cache").

        Returns:
            Whether they held any.
        """
        return not self._released and self._release("kv_cache")

    def _release(self, *tags: MemoryTag) -> bool:
        if self.share_device:
            self._placement.let_start(False)
            self._placement.change_memory(EngineClient.release_memory, tags)
            self._released = set(tags)
        return self.share_device

    def onload(self, tag: MemoryTag) -> None:
        """Collective: the engines allocate memory again: "weights" before a weight sync, "kv_cache"
        after it."""
        if tag in self._released:
            self._placement.change_memory(EngineClient.resume_memory, [tag])
            self._released.discard(tag)
            self._placement.let_start(not self._released)

    def close(self) -> None:
        """Stop this rank's server and close the connections to all of them."""
        # An engine that fails from now on has no work to hand to others.
        self._placement.on_lost(lambda _: None)
        if self._user is not None:
            self._user.close()
            self._user = None
        self._placement.close()

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
