"""Where the engines of a run are: who owns their servers, how weights reach them, and whose memory they use.

With GPUs, `rollout.tp` consecutive ranks share their GPUs with one engine, which the first of them starts and owns.
Without GPUs, each of the first ranks owns one. Engines of rollout.external_urls run on other devices and were started
by somebody else; rank 0 feeds all of them by one broadcast.
"""

import json
import math
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.inside.broadcast_group import address_towards
from vapo_megatron.engines.keeper import EngineKeeper, ExternalServer, Kept, is_named
from vapo_megatron.engines.remote_engines import take_back, take_over_engines, what_must_agree
from vapo_megatron.engines.server.client import REQUEST_SECONDS, EngineClient, MemoryTag, ask
from vapo_megatron.engines.server.process import EngineAddress, EngineServer
from vapo_megatron.engines.weight_sync.transports import (
    DistributedTransport,
    IpcTransport,
    SharedMemoryTransport,
    Transport,
)
from vapo_megatron.errors import BadInput, VapoError
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.spec import read_spec

TARGETS_FILE = "prometheus.json"


class Placement:
    """The engines of a run as one rank sees them.

    Attributes:
        keepers: keepers of the engines that this rank feeds: its own, or on rank 0 all external ones.
        shares_memory: whether engines and trainer share device memory and take turns.
        is_external: whether engines run on other devices; then the run ends once all are given up, otherwise once one
            is.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_dir: Path,
        dtype: Dtype,
        log_dir: Path,
        platform: Platform,
        fp8: BlockFp8 | None = None,
    ) -> None:
        """Collective. fp8: how weights are quantised for the engines; None: not at all.

        Raises:
            BadInput: rollout.sync.transport, or asynchronous rollouts, are not possible on this machine.
        """
        self._config, self._model_dir, self._dtype, self._fp8 = config, model_dir, dtype, fp8
        self._log_dir, self._platform = log_dir, platform
        self.is_external = bool(self._config.external_urls)
        self.shares_memory = platform.is_cuda and not self.is_external
        self.keepers: list[EngineKeeper] = []
        self._addresses, self._group = list[EngineAddress](), None
        self._engines_on_gpus = platform.is_cuda
        if not platform.is_cuda and self._config.sync.transport == "ipc":
            raise BadInput("rollout.sync.transport=ipc needs GPUs and there are none: set it to auto")
        if self.shares_memory:
            self._place_on_gpus()
        elif not self.is_external:
            host, rank = _reachable_host(), dist.get_rank()
            if rank < self._config.num_engines:
                self.keepers = [self._keeper(rank, None, host)]

    def _place_on_gpus(self) -> None:
        if (staleness := self._config.asynchronous.max_staleness) > 0:
            raise BadInput(
                f"rollout.asynchronous.max_staleness={staleness} with engines on the trainer's GPUs: they cannot "
                "generate while it updates, give rollout.external_urls (vapo-megatron engine), or set max_staleness=0"
            )
        host, rank, tp, first = _reachable_host(), dist.get_rank(), self._config.tp, self._platform.device.index
        self._group = _engine_group(tp)
        if rank % tp == 0:
            self.keepers = [self._keeper(rank // tp, range(first, first + tp), host)]

    def _keeper(self, index: int, devices: range | None, host: str) -> EngineKeeper:
        server = EngineServer(
            self._model_dir,
            self._config,
            self._dtype,
            self._log_dir / f"engine_{index}.log",
            devices,
            host=host,
            fp8=self._fp8,
            offloads=devices is not None,
        )
        return EngineKeeper(server, self._config)

    @property
    def keeper(self) -> EngineKeeper | None:
        """Keeper of the server that this rank owns; None if it owns none."""
        return None if self.is_external or not self.keepers else self.keepers[0]

    def wait_for_addresses(self) -> list[EngineAddress]:
        """Collective: the addresses of all engines, once they answer; external ones take requests again after the first
        weight sync.

        Raises:
            RunFailed: a server did not start; the message quotes its log.
            BadInput, TryAgain: see take_over_engines.
        """
        if self.is_external:
            addresses = self._take_over()
        else:
            if self.keeper is not None:
                self.keeper.wait_until_ready()
                self._addresses = [self.keeper.address]
            addresses = [address for of_rank in gather_values(self._addresses) for address in of_rank]
        if dist.get_rank() == 0 and self._config.server_args.get("enable_metrics"):
            write_targets(self._log_dir / TARGETS_FILE, addresses)
        return addresses

    def _take_over(self) -> list[EngineAddress]:
        config = self._config
        agreed = what_must_agree(config, read_spec(self._model_dir), self._dtype, self._fp8)
        addresses, self._engines_on_gpus = on_rank_zero(lambda: take_over_engines(config, agreed))
        if dist.get_rank() == 0:
            self._addresses = list(addresses)
            again = partial(take_back, answer_s=config.health.answer_s, agreed=agreed)
            servers = [ExternalServer(address, again) for address in addresses]
            self.keepers = [EngineKeeper(server, config, start_timeout_s=math.inf) for server in servers]
            for keeper in self.keepers:
                keeper.wait_until_ready()
        return list(addresses)

    def transport(self) -> Transport:
        """This rank's transport to the engines it feeds, once they answer; without clients if it feeds none.

        With CUDA IPC every rank takes part: each sends from the memory of its own GPU.
        """
        config, tp = self._config, self._config.tp
        clients = [EngineClient(address) for address in self._addresses]
        client, name = next(iter(clients), None), config.sync.transport
        if name == "auto":
            name = "distributed" if self.is_external else "ipc" if self.shares_memory else "shared_memory"
        if name == "ipc":
            return IpcTransport(client, self._platform.device, self._group if tp > 1 else None)
        if name == "distributed":
            on_gpus = self.is_external and self._engines_on_gpus
            device = self._platform.device if on_gpus else torch.device("cpu")
            return DistributedTransport(clients, tp, REQUEST_SECONDS, device)
        return SharedMemoryTransport(client, tp)

    def engines(self) -> list[Kept]:
        """States of the engines that this rank feeds."""
        return [keeper.look() for keeper in self.keepers]

    def fail(self, cause: str, served: bool = True) -> None:
        """End what is wrong among this rank's engines: the one that the cause names, else unhealthy ones, else all.

        served: see EngineKeeper.fail.
        """
        failed = self.keepers
        if len(failed) > 1:
            named = [keeper for keeper in self.keepers if is_named(keeper.address.url, cause)]
            failed = named or [keeper for keeper in self.keepers if keeper.is_unhealthy()] or self.keepers
        for keeper in failed:
            keeper.fail(cause, served)

    def let_start(self, allowed: bool) -> None:
        """Allow or forbid this rank's engine to start again: it takes all of its memory, which the trainer may use."""
        if self.keeper is not None:
            self.keeper.let_start(allowed)

    def ask_for_memory(
        self, call: Callable[[EngineClient, Sequence[MemoryTag]], Coroutine[Any, Any, None]], tags: Sequence[MemoryTag]
    ) -> None:
        """Collective: this rank's server releases memory, or takes it again."""
        self._platform.empty_cache()
        keeper = self.keeper
        if keeper is not None and keeper.look().state == "serving":
            try:
                ask(keeper.address, lambda client: call(client, tags))
            except VapoError as error:
                keeper.fail(str(error))
        dist.barrier()

    def survived(self, url: str) -> None:
        """An engine has served from one weight sync to the next."""
        for keeper in self.keepers:
            if keeper.address.url == url:
                keeper.survived()

    def tell(self, when_lost: Callable[[str], None]) -> None:
        """Have when_lost called with the URL of each engine that fails."""
        for keeper in self.keepers:
            keeper.when_lost = when_lost

    def close(self) -> None:
        """End this rank's server, and what watches others."""
        for keeper in self.keepers:
            keeper.stop()


def _reachable_host() -> str:
    """Collective: the address under which rank 0 reaches a server of this rank."""
    if len(set(gather_values(socket.gethostname()))) == 1:
        return "127.0.0.1"
    return address_towards(os.environ["MASTER_ADDR"])


def _engine_group(tp: int) -> Any:
    """Collective: the group (gloo) of the ranks that share their GPUs with this rank's engine."""
    my_group = None
    for first in range(0, dist.get_world_size(), tp):
        ranks = list(range(first, first + tp))
        group = dist.new_group(ranks, timeout=world_timeout(), backend="gloo")
        if dist.get_rank() in ranks:
            my_group = group
    return my_group


def write_targets(path: Path, addresses: Sequence[EngineAddress]) -> None:
    """Write the engines as a file of Prometheus' file_sd_configs."""
    targets = [address.url.removeprefix("http://") for address in addresses]
    with atomic_write(path) as file:
        json.dump([{"targets": targets, "labels": {"job": "sglang"}}], file)
