"""Where the engines of a run live: who owns their servers, how weights reach them, and whose memory they use.

With GPUs, `rollout.tp` consecutive ranks share their GPUs with one engine, which the first of them starts and owns; of
one on several nodes, the first rank on each owns that node's part (engines/node_part.py). Without, each of the first
ranks owns one. Engines of rollout.external_urls run on devices of their own and were started by somebody else; rank 0
feeds all of them, by one broadcast.
"""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.rollout import Dtype, RolloutConfig, TransportName
from vapo_megatron.engines.client import REQUEST_SECONDS, EngineClient
from vapo_megatron.engines.engine_home import HomedEngine, HomedKeeper
from vapo_megatron.engines.engine_watch import EngineWatch
from vapo_megatron.engines.inside.broadcast_group import address_towards
from vapo_megatron.engines.keeper import EngineKeeper, Kept, is_named
from vapo_megatron.engines.node_part import BESIDE_MEETING, WHOLE, NodePart, free_port, not_replaced, part_of_ranks
from vapo_megatron.engines.remote_engines import RemoteEngines, take_over_engines, what_must_agree
from vapo_megatron.engines.server import EngineAddress, EngineServer
from vapo_megatron.engines.weight_sync.transports import (
    DiskTransport,
    DistributedTransport,
    IpcTransport,
    SharedMemoryTransport,
    Transport,
)
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.fp8 import BlockFp8
from vapo_megatron.weights.spec import read_spec


@dataclass(frozen=True)
class EngineSettings:
    """What every engine of a run is started with. fp8: how its weights are quantised; None where they are not."""

    config: RolloutConfig
    model_dir: Path
    dtype: Dtype
    log_dir: Path
    fp8: BlockFp8 | None = None


class Placement(ABC):
    """The engines of a run as one rank sees them.

    keeper: of the server that this rank owns, to be started and stopped by whoever holds this object; None where it
        owns none.
    shares_memory: whether engines use memory of the trainer's device, so that the two have to take turns.
    needs_all: whether the run ends where one engine is given up; else where all are.
    """

    keeper: EngineKeeper | HomedKeeper | None = None
    shares_memory = False
    needs_all = True

    def __init__(self, settings: EngineSettings, platform: Platform, home: Path | None = None) -> None:
        self._settings, self._config, self._platform, self._home = settings, settings.config, platform, home

    @property
    def taken_over(self) -> bool:
        """Whether this rank's engine was there before it."""
        return isinstance(self.keeper, HomedKeeper) and self.keeper.taken_over

    @abstractmethod
    def wait_for_addresses(self) -> list[EngineAddress]:
        """Collective: every engine's address, once all of them answer; on other ranks than 0 possibly none."""

    @abstractmethod
    def transport(self) -> Transport:
        """The way from this rank to the engines it feeds, once they answer; one without clients where it feeds none."""

    @abstractmethod
    def engines(self) -> list[Kept]:
        """How the engines are that this rank feeds."""

    @abstractmethod
    def fail(self, cause: str, served: bool = True) -> None:
        """An engine that this rank feeds was found to be wrong: the one that the cause names.

        served: see EngineKeeper.fail.
        """

    @abstractmethod
    def survived(self, url: str) -> None:
        """An engine has served from one weight sync to the next."""

    @abstractmethod
    def tell(self, when_lost: Callable[[str], None]) -> None:
        """Call when_lost with the URL of an engine that fails where no broken connection tells of it."""

    def close(self) -> None:
        """End this rank's server, and what watches others."""
        if self.keeper is not None:
            self.keeper.stop()

    def _disk(self, clients: list[EngineClient]) -> DiskTransport:
        return DiskTransport(clients, Path(self._config.sync.directory or self._settings.log_dir))


class _OwnEngines(Placement):
    """Servers that ranks of this run start on their machines. leads: whether this rank's takes requests."""

    default_transport: TransportName
    leads = True

    def wait_for_addresses(self) -> list[EngineAddress]:
        """See Placement.

        Raises:
            RunFailed: a server did not start; its log's cause is named.
        """
        address = None
        if self.keeper is not None:
            self.keeper.wait_until_ready()
            address = self.keeper.address if self.leads else None
        return [found for found in gather_values(address) if found is not None]

    @override
    def transport(self) -> Transport:
        client, config = self._own_client(), self._config
        clients = [] if client is None else [client]
        name = self.default_transport if config.sync.transport == "auto" else config.sync.transport
        if name == "distributed":
            return DistributedTransport(clients, config.tp, REQUEST_SECONDS)
        return self._disk(clients) if name == "disk" else SharedMemoryTransport(client, config.tp)

    def _own_client(self) -> EngineClient | None:
        return EngineClient(self.keeper.address) if self.keeper is not None and self.leads else None

    @override
    def engines(self) -> list[Kept]:
        found = [] if self.keeper is None else [self.keeper.look()]
        # A part of an engine is reported when it fails: then the engine has.
        return found if self.leads else [one for one in found if one.state != "serving"]

    @override
    def fail(self, cause: str, served: bool = True) -> None:
        assert self.keeper is not None
        self.keeper.fail(cause, served)

    @override
    def tell(self, when_lost: Callable[[str], None]) -> None:
        """Their keepers end those that fail, which breaks their connections."""

    @override
    def survived(self, url: str) -> None:
        assert self.keeper is not None
        self.keeper.survived()

    def _keeper(
        self, index: int, devices: range | None, host: str, part: NodePart = WHOLE
    ) -> EngineKeeper | HomedKeeper:
        engine = HomedEngine(make_server, (self._settings, index, devices, host, part), self._config)
        if self._home is None:
            return EngineKeeper(engine.make(*engine.arguments), self._config)
        # How much of the trainer's GPU one holds that shares it is not known after a kill: those are started anew.
        return HomedKeeper(self._home, index, engine, may_take_over=not self.shares_memory)


def make_server(
    made: EngineSettings, index: int, devices: range | None, host: str, part: NodePart = WHOLE
) -> EngineServer:
    """The server with this number; devices: of the GPUs it uses, None without; part: of it, this node's."""
    log_file = made.log_dir / (f"engine_{index}.log" if part.leads else f"engine_{index}_node_{part.index}.log")
    return EngineServer(made.model_dir, made.config, made.dtype, log_file, devices, host=host, fp8=made.fp8, part=part)


class CpuPlacement(_OwnEngines):
    """Each of the first rollout.num_engines ranks owns a server on its machine's CPU."""

    default_transport = "shared_memory"

    def __init__(self, settings: EngineSettings, platform: Platform, home: Path | None = None) -> None:
        """Collective.

        Raises:
            BadInput: rollout.sync.transport needs GPUs.
        """
        super().__init__(settings, platform, home)
        _refuse_ipc(self._config)
        host, rank = _reachable_host(), dist.get_rank()
        if rank < self._config.num_engines:
            self.keeper = self._keeper(rank, None, host)


class ColocatedPlacement(_OwnEngines):
    """rollout.tp consecutive ranks share their GPUs with one engine, whose server the first of them owns."""

    default_transport = "ipc"
    shares_memory = True

    def __init__(self, settings: EngineSettings, platform: Platform, home: Path | None = None) -> None:
        """Collective.

        Raises:
            BadInput: engines are to generate while the trainer updates.
        """
        super().__init__(settings, platform, home)
        if (staleness := self._config.asynchronous.max_staleness) > 0:
            raise BadInput(
                f"rollout.asynchronous.max_staleness={staleness} with engines on the trainer's GPUs: they cannot "
                "generate while it updates, give rollout.external_urls (vapo-megatron engine), or set max_staleness=0"
            )
        host, rank, tp = _reachable_host(), dist.get_rank(), self._config.tp
        self._group = _engine_group(tp)
        part = part_of_ranks(rank, tp, platform.device_count())
        beside = BESIDE_MEETING if self._config.attention_parts > 1 else ()
        meeting = _meeting(host, self._group, beside) if tp > platform.device_count() else ""
        if part is not None:
            first, part, self.leads = platform.device.index, replace(part, meeting=meeting), part.leads
            if part.of > 1:
                self._config = not_replaced(self._config)
            self.keeper = self._keeper(rank // tp, range(first, first + tp // part.of), host, part)

    def transport(self) -> Transport:
        """See Placement. CUDA IPC takes part of every rank: each sends from the memory of its own GPU."""
        if self._config.sync.transport not in ("auto", "ipc"):
            return super().transport()
        return IpcTransport(self._own_client(), self._platform.device, self._group if self._config.tp > 1 else None)


class ExternalPlacement(Placement):
    """Engines of rollout.external_urls, on devices of their own, which outlive the run; rank 0 feeds all of them."""

    needs_all = False

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        super().__init__(settings, platform)
        if not platform.is_cuda:  # the transport is a GPU's alone, wherever engines are
            _refuse_ipc(self._config)
        self._engines: RemoteEngines | None = None
        self._watches: dict[str, EngineWatch] = {}

    def wait_for_addresses(self) -> list[EngineAddress]:
        """See Placement. They take requests again after the first weight sync.

        Raises:
            BadInput, TryAgain: see take_over_engines.
        """
        made = self._settings
        agreed = what_must_agree(self._config, read_spec(made.model_dir), made.dtype, made.fp8)
        self._engines = on_rank_zero(lambda: take_over_engines(self._config, agreed))
        if dist.get_rank() == 0:
            self._watches = {
                address.url: EngineWatch(address, self._config, agreed) for address in self._engines.addresses
            }
        return list(self._engines.addresses)

    @override
    def engines(self) -> list[Kept]:
        return [watch.look() for watch in self._watches.values()]

    @override
    def fail(self, cause: str, served: bool = True) -> None:
        named = [watch for url, watch in self._watches.items() if is_named(url, cause)]
        unhealthy = named or [watch for watch in self._watches.values() if watch.is_unhealthy()]
        for watch in unhealthy or self._watches.values():
            watch.fail(cause)

    @override
    def survived(self, url: str) -> None:
        self._watches[url].survived()

    @override
    def tell(self, when_lost: Callable[[str], None]) -> None:
        for watch in self._watches.values():
            watch.when_lost = when_lost

    @override
    def close(self) -> None:
        for watch in self._watches.values():
            watch.stop()

    @override
    def transport(self) -> Transport:
        assert self._engines is not None
        addresses, config = self._engines.addresses if dist.get_rank() == 0 else (), self._config
        clients = [EngineClient(address) for address in addresses]
        if config.sync.transport == "disk":
            return self._disk(clients)
        device = self._platform.device if self._engines.cuda else torch.device("cpu")
        return DistributedTransport(clients, config.tp, REQUEST_SECONDS, device)


def place_engines(settings: EngineSettings, platform: Platform, home: Path | None = None) -> Placement:
    """Collective: the placement that a config asks for on this kind of machine. home: of engines that outlive ranks.

    Raises:
        BadInput: rollout.sync.transport is not possible there.
    """
    if settings.config.external_urls:
        return ExternalPlacement(settings, platform)
    return (ColocatedPlacement if platform.is_cuda else CpuPlacement)(settings, platform, home)


def _refuse_ipc(config: RolloutConfig) -> None:
    if config.sync.transport == "ipc":
        raise BadInput("rollout.sync.transport=ipc needs GPUs and there are none: set it to auto")


def _reachable_host() -> str:
    """Collective: the address under which rank 0 reaches a server of this rank."""
    if len(set(gather_values(socket.gethostname()))) == 1:
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


def _meeting(host: str, group: Any, beside: Sequence[int]) -> str:
    """Collective over the ranks of one engine: where its parts on several nodes meet, a port of the first that is free
    now, as are those at these distances above it."""
    first, box = dist.get_process_group_ranks(group)[0], [""]
    if dist.get_rank() == first:
        port = free_port(beside)
        box = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    dist.broadcast_object_list(box, src=first, group=group)
    return box[0]
