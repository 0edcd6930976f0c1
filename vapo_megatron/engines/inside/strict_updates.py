"""Strict loading in SGLang's own weight updates: they go through StrictLoader, and rank 0 answers
for all tensor-parallel ranks."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.engines.inside.broadcast_group import Backend, BroadcastGroup, address_towards
from vapo_megatron.engines.inside.strict_loading import StrictLoader
from vapo_megatron.weights.bucket import buffer_of, places_of
from vapo_megatron.weights.changes import Difference

LOAD_FORMAT = "vapo_strict"
_JOIN_SECONDS = 600.0


def install_strict_loading() -> None:
    """Add LOAD_FORMAT to the SGLang of this process, for tensors and broadcasts.

    The answer's message is JSON with the fields of client.LoadAnswer and the problems of all
    tensor-parallel ranks. Success means that there are none.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader import utils

    # Some loaders copy tensors of host memory in their own threads, where a watch, which is of
    # one thread, sees nothing.
    utils.should_async_load = _never
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.models.") and hasattr(module, "should_async_load"):
            module.should_async_load = _never  # type: ignore[attr-defined]

    loaders: dict[int, StrictLoader] = {}
    from_tensor = WeightUpdater.update_weights_from_tensor

    def loader_of(updater: Any) -> StrictLoader:
        model = updater.get_model()
        return loaders.setdefault(id(model), StrictLoader(model))

    def update_weights_from_tensor(
        self: Any, named_tensors: Any, load_format: str | None = None
    ) -> tuple[bool, str]:
        if load_format != LOAD_FORMAT:
            return from_tensor(self, named_tensors, load_format)
        loader = loader_of(self)
        return _answer(
            loader, lambda: take_message(loader, named_tensors, named_tensors.get("buffer"))
        )

    def load_weights_from_distributed(
        self: Any, received: tuple[dict[str, Any], torch.Tensor | None]
    ) -> Any:
        loader = loader_of(self)
        return _answer(loader, lambda: take_message(loader, *received))

    WeightUpdater.update_weights_from_tensor = update_weights_from_tensor
    WeightUpdater.init_weights_update_group = _join_group
    WeightUpdater.receive_weights_from_distributed = _receive
    WeightUpdater.load_weights_from_distributed = load_weights_from_distributed


def _never(weight: torch.Tensor) -> bool:
    return False


def _answer(loader: StrictLoader, load: Callable[[], list[str]]) -> tuple[bool, str]:
    """Runs on every tensor-parallel rank; rank 0 answers for all."""
    from sglang.srt.runtime_context import get_parallel

    start = time.perf_counter()
    try:
        problems = load()
    except Exception as error:  # the scheduler would end, and the other ranks wait for this one
        problems = [
            f"the weights could not be read ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]})"
        ]
    group = get_parallel().tp_group.cpu_group
    ranks: list[tuple[list[str], list[str], list[int]]] = [([], [], [])] * dist.get_world_size(
        group
    )
    dist.all_gather_object(ranks, (problems, loader.unknown, loader.checksums), group=group)
    all_problems = problems_of_ranks([(lines, unknown) for lines, unknown, _ in ranks])
    message = {
        "problems": all_problems,
        "seconds": time.perf_counter() - start,
        "checksums": [checksums for _, _, checksums in ranks],
    }
    return not all_problems, json.dumps(message)


def problems_of_ranks(ranks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The problems of a bucket on a server, merged from its ranks.

    ranks: each rank's problems, and the subset in StrictLoader.unknown. A tensor unknown on only
        some of the ranks is an expert of another rank.
    """
    placed = {
        line
        for _, unknown in ranks
        for line in unknown
        if any(line not in there for _, there in ranks)
    }
    return [
        line
        for line in dict.fromkeys(line for lines, _ in ranks for line in lines)
        if line not in placed
    ]


def take_message(
    loader: StrictLoader, message: Mapping[str, Any], buffer: torch.Tensor | None = None
) -> list[str]:
    """StrictLoader.take of what weights.bucket.announce describes, or take_changes; buffer: its
    bytes, if they are not in the file at its "path"."""
    places = places_of(message)
    if message.get("difference"):
        assert buffer is not None, "changes are broadcast"
        difference = Difference(*message["difference"])
        return loader.take_changes(
            places, buffer, difference, message["size"], first=message["first"]
        )
    return loader.take_bucket(
        places,
        buffer_of(message, buffer),
        message["purpose"],
        first=message["first"],
        last=message["last"],
        changes_follow=message.get("changes_follow", False),
        own_shares=message.get("own_shares", False),
    )


def _join_group(
    self: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: Backend = "gloo",
) -> tuple[bool, str]:
    """Joins a group, replacing an earlier trainer's group."""
    rank = rank_offset + self.tp_rank
    self._model_update_group.pop(group_name, None)
    try:
        host = address_towards(master_address)
        store = BroadcastGroup.connect(master_address, master_port, world_size, _JOIN_SECONDS)
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
        group = BroadcastGroup(store, rank, world_size, _JOIN_SECONDS, host, device)
        self._model_update_group[group_name] = group
    except (RuntimeError, OSError) as error:
        return False, f"{group_name} at {master_address}:{master_port} was not joined: {error}"
    return True, f"joined {group_name} as rank {rank}"


def _receive(
    self: Any, *, group_name: str, load_format: str, **_: Any
) -> tuple[dict[str, Any], torch.Tensor | None]:
    message = json.loads(load_format.removeprefix(f"{LOAD_FORMAT}:"))
    if not message["size"]:
        return message, None
    group = self._model_update_group[group_name]
    size = message["size"]
    if message.get("difference"):
        size = Difference(*message["difference"]).nbytes
    buffer = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(buffer)
    return message, buffer


BROADCAST_GROUP = "vapo_weights"
