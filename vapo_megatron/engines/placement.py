"""Where the engines of a run are: which rank owns each server, how weights reach it, whose memory
it uses.

With GPUs, `rollout.tp` consecutive ranks share their GPUs with one engine, which the first of them
starts and owns. Without GPUs, each of the first ranks owns one. Of an engine on several nodes
(rollout.nodes), a rank on each of them owns that node's part. Engines of rollout.external_urls run
on other devices and were started by another process; rank 0 feeds all of them with one broadcast.
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
from vapo_megatron.config.rollout import Dtype, RolloutConfig
from vapo_megatron.engines.external_server import ExternalServer
from vapo_megatron.engines.inside.broadcast_group import address_towards
from vapo_megatron.engines.keeper import EngineKeeper, EngineStatus, is_named
from vapo_megatron.engines.remote_engines import compatibility_fields, take_back, take_over_engines
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, MemoryTag, call_once
from vapo_megatron.engines.server.connection import REQUEST_SECONDS
from vapo_megatron.engines.server.node_part import NodePart
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.transports import (
    IpcTransport,
    SharedMemoryTransport,
    Transport,
)
from vapo_megatron.errors import BadInput, VapoError
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.fp8 import BlockFp8

TARGETS_FILE = "prometheus.json"


class Placement:
    """The engines of a run as one rank sees them.

    Attributes:
        keepers: keepers of the engines that this rank feeds: its own, or on rank 0 all external
            ones.
        shares_memory: whether engines and trainer use the same device memory and take turns.
        is_external: whether engines run on other devices. Then the run ends once all of them are
            given up, otherwise once one is.
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
        """Collective. Arguments: see EnginePool.

        Raises:
            BadInput: this machine does not support rollout.sync.transport or asynchronous rollouts.
        """
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype
        self._fp8 = fp8
        self._log_dir = log_dir
        self._platform = platform
        self.is_external = bool(self._config.external_urls)
        self.shares_memory = platform.is_cuda and not self.is_external
        self.keepers: list[EngineKeeper] = []
        self._addresses: list[EngineAddress] = []
        self._group: dist.ProcessGroup | None = None
        self._engines_on_gpus = platform.is_cuda
        if not platform.is_cuda and self._config.sync.transport == "ipc":
            raise BadInput(
                "rollout.sync.transport=ipc needs GPUs and this machine has none: set it to auto"
            )
        if self.shares_memory:
            self._place_on_gpus()
        elif not self.is_external:
            self._place_on_hosts()

    def _place_on_hosts(self) -> None:
        config = self._config
        host = _reachable_host()
        owned = part_owners(gather_values(socket.gethostname()), config.nodes, config.num_engines)
        mine = owned.get(dist.get_rank())
        for engine in range(config.num_engines):
            part = self._part(host, engine, mine)
            if mine is not None and mine[0] == engine:
                self.keepers = [self._keeper(engine, None, host, part)]

    def _place_on_gpus(self) -> None:
        if (staleness := self._config.asynchronous.max_staleness) > 0:
            raise BadInput(
                f"rollout.asynchronous.max_staleness={staleness} with engines on the trainer's "
                "GPUs: they cannot generate while it updates. Give rollout.external_urls "
                "(vapo-megatron engine), or set max_staleness=0"
            )
        host = _reachable_host()
        rank = dist.get_rank()
        tp = self._config.tp
        here = tp // self._config.nodes
        self._group = _engine_group(tp)
        mine = None
        if rank % here == 0:
            mine = rank // tp, rank % tp // here
        for engine in range(dist.get_world_size() // tp):
            part = self._part(host, engine, mine)
            if mine is not None and mine[0] == engine:
                first = self._platform.device.index
                self.keepers = [self._keeper(engine, range(first, first + here), host, part)]

    def _part(self, host: str, engine: int, mine: tuple[int, int] | None) -> NodePart | None:
        """Collective: this rank's part of an engine on several nodes. None if it owns none of it,
        or if engines are on one node.

        Args:
            host: this rank's address.
            engine: the engine.
            mine: of which engine this rank owns which part.
        """
        config = self._config
        if config.nodes == 1:
            return None
        part = None
        place: tuple[str, int] | None = None
        is_mine = mine is not None and mine[0] == engine
        if mine == (engine, 0):
            part = NodePart(0, config.nodes, host, 0, config.health.answer_s)
            place = part.host, part.port
        place = next(found for found in gather_values(place) if found is not None)
        if is_mine and part is None:
            assert mine is not None
            part = NodePart(mine[1], config.nodes, *place, config.health.answer_s)
        return part

    def _keeper(
        self, index: int, devices: range | None, host: str, part: NodePart | None
    ) -> EngineKeeper:
        name = f"engine_{index}"
        if part is not None and not part.leads:
            name += f"_node_{part.index}"
        server = EngineServer(
            self._model_dir,
            self._config,
            self._dtype,
            self._log_dir / f"{name}.log",
            devices,
            host=host,
            fp8=self._fp8,
            offloads=devices is not None,
            part=part,
        )
        return EngineKeeper(server, self._config)

    @property
    def _leads(self) -> bool:
        """Whether this rank owns a server, or the part of one that requests go to."""
        return self.keeper is not None and self.keeper.leads

    @property
    def keeper(self) -> EngineKeeper | None:
        """Keeper of the server, or of its part, that this rank owns; None if it owns none."""
        if self.is_external or not self.keepers:
            return None
        return self.keepers[0]

    def wait_for_addresses(self) -> list[EngineAddress]:
        """Collective: the addresses of all engines, once they answer.

        External engines accept requests again after the first weight sync.

        Raises:
            RunFailed: a server did not start; the message quotes its log.
            BadInput, TryAgain: see take_over_engines.
        """
        if self.is_external:
            addresses = self._take_over()
        else:
            if self.keeper is not None:
                self.keeper.wait_until_ready()
            if self.keeper is not None and self._leads:
                self._addresses = [self.keeper.address]
            addresses = [address for rank in gather_values(self._addresses) for address in rank]
        if dist.get_rank() == 0 and self._config.server_args.get("enable_metrics"):
            write_targets(self._log_dir / TARGETS_FILE, addresses)
        return addresses

    def _take_over(self) -> list[EngineAddress]:
        config = self._config
        fields = compatibility_fields(config, read_spec(self._model_dir), self._dtype, self._fp8)
        addresses, self._engines_on_gpus = on_rank_zero(lambda: take_over_engines(config, fields))
        if dist.get_rank() == 0:
            self._addresses = list(addresses)
            again = partial(take_back, deadline=config.health.answer_s, fields=fields)
            servers = [ExternalServer(address, again) for address in addresses]
            self.keepers = [
                EngineKeeper(server, config, start_timeout_s=math.inf) for server in servers
            ]
            for keeper in self.keepers:
                keeper.wait_until_ready()
        return list(addresses)

    def transport(self) -> Transport:
        """This rank's transport to the engines that it feeds, once they answer.

        It has no clients if the rank feeds none. With CUDA IPC every rank takes part: each sends
        from its GPU's memory.
        """
        tp = self._config.tp
        clients = [EngineClient(address) for address in self._addresses]
        client = clients[0] if clients else None
        name = self._config.sync.transport
        if name == "auto":
            if self.is_external:
                name = "distributed"
            elif self.shares_memory:
                name = "ipc"
            elif self._config.nodes > 1:
                name = "distributed"
            else:
                name = "shared_memory"
        if name == "ipc":
            return IpcTransport(client, self._platform.device, self._group if tp > 1 else None)
        if name == "distributed":
            on_gpus = self.is_external and self._engines_on_gpus
            if on_gpus:
                device = self._platform.device
            else:
                device = torch.device("cpu")
            only_changes = self._config.sync.only_changes
            return DistributedTransport(clients, tp, REQUEST_SECONDS, device, only_changes)
        return SharedMemoryTransport(client, tp)

    def engines(self) -> list[EngineStatus]:
        """States of the engines that this rank feeds; an engine on several nodes fails as one."""
        return [keeper.status() for keeper in self.keepers if keeper.leads]

    def fail(self, cause: str, served: bool = True) -> None:
        """Kill and restart the faulty ones among this rank's engines.

        That is the engine that the cause names; if it names none, unhealthy ones; if there are
        none, all of them.

        Args:
            cause: the fault, in words.
            served: see EngineKeeper.fail.
        """
        failed = self.keepers
        if len(failed) > 1:
            failed = [keeper for keeper in self.keepers if is_named(keeper.address.url, cause)]
        if not failed:
            failed = [keeper for keeper in self.keepers if keeper.is_unhealthy()]
        for keeper in failed or self.keepers:
            keeper.fail(cause, served)

    def let_start(self, allowed: bool) -> None:
        """Allow or forbid restarts of this rank's engine, which would take the memory that the
        trainer uses."""
        if self.keeper is not None:
            self.keeper.let_start(allowed)

    def change_memory(
        self,
        call: Callable[[EngineClient, Sequence[MemoryTag]], Coroutine[Any, Any, None]],
        tags: Sequence[MemoryTag],
    ) -> None:
        """Collective: this rank's server releases or allocates memory.

        Args:
            call: EngineClient.release_memory or EngineClient.resume_memory.
            tags: which memory.
        """
        self._platform.empty_cache()
        keeper = self.keeper
        if keeper is not None and self._leads and keeper.status().state == "serving":
            try:
                call_once(keeper.address, lambda client: call(client, tags))
            except VapoError as error:
                keeper.fail(str(error))
        dist.barrier()

    def survived(self, url: str) -> None:
        """The engine at this URL has served from one weight sync to the next."""
        for keeper in self.keepers:
            if keeper.address.url == url:
                keeper.survived()

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Have this called with the URL of each engine that fails."""
        for keeper in self.keepers:
            keeper.on_lost = call

    def close(self) -> None:
        """Stop this rank's server, and the keepers of external ones."""
        for keeper in self.keepers:
            keeper.stop()


def part_owners(hosts: Sequence[str], nodes: int, engines: int) -> dict[int, tuple[int, int]]:
    """Which ranks own which (engine, part) on machines without GPUs.

    An engine on one node belongs to a rank each, from the first on. The parts of one on several
    nodes belong to a rank of each of as many nodes.

    Args:
        hosts: the node of every rank.
        nodes: number of nodes of an engine.
        engines: number of engines.

    Raises:
        BadInput: the ranks are on too few nodes, or too few ranks are on one.
    """
    if nodes == 1:
        return {engine: (engine, 0) for engine in range(engines)}
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    blocks = [list(block) for block in zip(*[iter(ranks.values())] * nodes, strict=False)]
    if not blocks:
        raise BadInput(
            f"rollout.nodes={nodes}: the ranks of the run are on {len(ranks)} nodes, give the run "
            "more of them, or lower it"
        )
    owners: dict[int, tuple[int, int]] = {}
    for engine in range(engines):
        for part, there in enumerate(blocks[engine % len(blocks)]):
            if engine // len(blocks) >= len(there):
                raise BadInput(
                    f"rollout.num_engines={engines} with rollout.nodes={nodes}: {hosts[there[0]]} "
                    f"has {len(there)} ranks, each of which owns a part of one engine at most: "
                    "lower one of them"
                )
            owners[there[engine // len(blocks)]] = engine, part
    return owners


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
    """Write the engines' addresses as a file for Prometheus' file_sd_configs."""
    targets = [address.url.removeprefix("http://") for address in addresses]
    with atomic_write(path) as file:
        json.dump([{"targets": targets, "labels": {"job": "sglang"}}], file)
