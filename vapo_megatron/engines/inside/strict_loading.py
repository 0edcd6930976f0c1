"""Weight updates, inside the engine, that report the tensors they could not place.

SGLang's models skip names they do not know and report success; they also stack what a checkpoint
keeps apart (query, key and value; gate and up) and cut it over tensor-parallel ranks. Only the
model's own loader knows which elements of which parameter a tensor fills, so it is watched while it
copies: a tensor that wrote nothing is unknown, and a parameter that is not written in full was not
    sent in full. The same watch, comparing instead of copying, finds tensors
that differ. The answer has checksums of the bytes as they arrived, which the sender compares with
its own.

The watch costs tens of copies a tensor. Where the loader did nothing but copy, the same bucket of a
later sync is copied to the same places without it (replay.py), and the first time compared with
what the loader would have done.
"""

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.engines.inside.broadcast_group import Backend, BroadcastGroup, address_towards
from vapo_megatron.engines.inside.replay import BucketReplay, Placement
from vapo_megatron.weights.bucket import (
    Place,
    Purpose,
    buffer_of,
    places_of,
    sums_of_places,
    view,
)

LOAD_FORMAT = "vapo_strict"
BROADCAST_GROUP = "vapo_weights"

NamedTensor = tuple[str, torch.Tensor]

_JOIN_SECONDS = 600.0
# Buckets that are remembered; a sync of other sizes than the one before begins to learn again.
_MOST_REPLAYS = 4096
_COPY = torch.ops.aten.copy_.default
# Projections that SGLang's models with latent attention hold as one parameter, and the end of its
# name. Their loaders keep the first of the two until the other comes, within one call.
_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
_PAIR_AS_ONE = "fused_qkv_a_proj_with_mqa.weight"
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class ParameterWatch(TorchDispatchMode):
    """Counts the elements written into each of a model's parameters; with compare, compares instead
    of writing.

    Fills of a scalar count; larger ones count only with count_fills, as loaders pad with them,
    which may hide a tensor that is too short.

    written: engine parameter name -> elements. differs: whether a compared element was not equal.
    placement: all that was done since start(); outside: between tensors.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], compare: bool, count_fills: bool
    ) -> None:
        super().__init__()
        self._names = {
            tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()
        }
        self._compare = compare
        self._count_fills = count_fills
        self.outside = Placement(None)
        self.start(None)

    def start(self, tensor: torch.Tensor | None) -> None:
        """Begin to count for the next tensor; None: the one before is placed."""
        self.written: Counter[str] = Counter()
        self.differs = False
        self.placement = self.outside if tensor is None else Placement(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = None
        if func is _COPY or func in _FILLS:
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                if func is _COPY or self._count_fills or args[0].numel() == 1:
                    self.written[name] += args[0].numel()
                if self._compare:
                    expected = torch.empty_like(args[0])
                    func(expected, *args[1:], **(kwargs or {}))
                    self.differs |= not _equal(args[0], expected)
                    return args[0]
        self.placement.saw(func, args, name is not None, bool(kwargs))
        return func(*args, **(kwargs or {}))


class StrictLoader:
    """Takes the buckets of one weight sync after another into one model, or one tensor-parallel
    rank's part of it.

    checksums: of the tensors of the latest bucket, as they arrived. unknown: the problem lines of
        its tensors that
    filled nothing on this rank, among them experts of other ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.checksums: list[int] = []
        self.unknown: list[str] = []
        # Checksums run beside the copies and outside the watch, which would slow each of their
        # operations.
        self._pool = ThreadPoolExecutor(1, "vapo-checksums")
        self._pads = _pads_dimensions(model)
        self._has_pairs = any(name.endswith(_PAIR_AS_ONE) for name, _ in model.named_parameters())
        # The first of each pair whose other half has not come yet: it may be in the next bucket.
        self._halves: dict[str, torch.Tensor] = {}
        self._written: Counter[str] = Counter()
        self._sources: defaultdict[str, list[str]] = defaultdict(list)
        # What the loader did with each tensor of the latest bucket, and outside of them.
        self._placements: list[Placement] = []
        self._is_plain = True
        self._replays: dict[tuple[Place, ...], BucketReplay] = {}
        self._addresses: dict[str, int] = {}

    def take_bucket(
        self,
        places: tuple[Place, ...],
        buffer: torch.Tensor,
        purpose: Purpose,
        *,
        first: bool,
        last: bool,
    ) -> list[str]:
        """take() of the tensors at these places of a buffer; a bucket that was learnt is copied."""
        if first:
            self._begin()
        replay = self._replays.get(places)
        sums = self._pool.submit(sums_of_places, buffer, places)
        if replay is not None and self._is_plain and purpose == "load" and not last:
            problems = self._replayed(replay, buffer)
        else:
            before = (self._written.copy(), {name: len(s) for name, s in self._sources.items()})
            tensors = [(place.name, view(buffer, place)) for place in places]
            problems = self.take(tensors, purpose, first=False, last=last)
            if purpose == "load" and not last and problems == self.unknown:
                self._learn(places, *before)
        self.checksums = sums.result()
        return problems

    def _replayed(self, replay: BucketReplay, buffer: torch.Tensor) -> list[str]:
        replay.run(buffer)
        if not replay.compared:
            # Once: is all now as the loader would have left it?
            counts = self._written.copy(), {name: [*s] for name, s in self._sources.items()}
            tensors = [(place.name, view(buffer, place)) for place in replay.places]
            found = self.take(tensors, "compare", first=False, last=False)
            self._written = counts[0]
            self._sources = defaultdict(list, counts[1])
            if found != list(replay.unknown):
                self._is_plain = False  # the loader does something else than it did before
                return self.take(tensors, "load", first=False, last=False)
            replay.compared = True
        self._written.update(replay.written)
        for name, sources in replay.sources.items():
            self._sources[name] += sources
        self.unknown = list(replay.unknown)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return list(replay.unknown)

    def _learn(
        self, places: tuple[Place, ...], written: Counter[str], counts: Mapping[str, int]
    ) -> None:
        """Keep the writes of the latest bucket, if copies can repeat them. written, counts: of
        elements and of sources by parameter, before that bucket."""
        if not self._is_plain:
            self._replays.clear()
            return
        replay = BucketReplay.of(
            places,
            self._placements,
            self._written - written,
            {name: found[counts.get(name, 0) :] for name, found in self._sources.items()},
            self.unknown,
        )
        if replay is not None:
            self._replays[places] = replay

    def _begin(self) -> None:
        """Begin a weight sync."""
        self._written.clear()
        self._sources.clear()
        self._halves.clear()
        addresses = {name: p.data_ptr() for name, p in self._model.named_parameters()}
        if addresses != self._addresses or len(self._replays) > _MOST_REPLAYS:
            self._replays.clear()
            self._addresses = addresses

    def take(
        self, tensors: Iterable[NamedTensor], purpose: Purpose, *, first: bool, last: bool
    ) -> list[str]:
        """Load or compare a bucket. Returns one line for each problem.

        first and last mark the ends of a weight sync. The tensors' memory is not needed after the
        return.
        """
        parameters = dict(self._model.named_parameters())
        self.unknown = []
        if first:
            self._begin()
        watch = ParameterWatch(parameters, purpose == "compare", count_fills=self._pads)
        self._placements = []
        problems = self._watched(iter(tensors), watch)
        self._is_plain &= watch.outside.is_plain or purpose == "compare"
        if last:
            problems.extend(self._not_received(parameters))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return problems

    def _watched(self, tensors: Iterator[NamedTensor], watch: ParameterWatch) -> list[str]:
        """Feed the model's loader, which places each tensor before it asks for the next, so that
        each is seen alone."""
        problems: list[str] = []
        current: tuple[str, torch.Tensor] | None = None

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                other = self._other_half(name)
                if other is not None and other not in self._halves:
                    self._halves[name] = tensor.clone()  # its memory is not this process's own
                    continue
                current = (name, tensor)
                watch.start(tensor)
                if other is not None:
                    yield other, self._halves.pop(other)
                yield current
                both = name if other is None else f"{other} with {name}"
                problems.extend(self._settle(both, tensor, watch))
                self._placements.append(watch.placement)
                watch.start(None)
                current = None

        load = self._load_each if _lists_tensors_first(self._model) else self._model.load_weights
        while True:
            try:
                with watch:
                    load(feed())  # type: ignore[operator]
            except Exception as error:  # whatever a model's loader raises, report it to the sender
                if str(error):
                    reason = str(error).splitlines()[0]
                else:
                    reason = type(error).__name__
                if current is None:
                    problems.append(f"the engine's loader failed ({reason})")
                    break
                name, tensor = current
                self._count(name, tensor, watch)
                problems.append(
                    f"{name} of shape {list(tensor.shape)} does not fit the engine's parameter "
                    f"({reason})"
                )
                watch.start(None)
                current = None
            else:
                break
        return problems

    def _load_each(self, tensors: Iterator[NamedTensor]) -> None:
        """Give the model's loader one tensor at a time, a copy: gpt-oss's sets biases that a
        rank does not add to 0 in place, in memory that other ranks read."""
        for name, tensor in tensors:
            is_bias = tensor.dim() == 2 and name.endswith("_bias")
            self._model.load_weights([(name, tensor.clone() if is_bias else tensor)])  # type: ignore[operator]

    def _other_half(self, name: str) -> str | None:
        """The name of the tensor that the model's loader copies together with this one; None: it
        copies this one alone."""
        if not self._has_pairs:
            return None
        first, second = _PAIR
        if f".{second}." in name:
            return name.replace(second, first)
        return name.replace(first, second) if f".{first}." in name else None

    def _settle(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> list[str]:
        self._count(name, tensor, watch)
        if not watch.written:
            self.unknown.append(f"{name} of shape {list(tensor.shape)} is not known to the engine")
            return self.unknown[-1:]
        if watch.differs:
            return [f"{name} differs"]
        return []

    def _count(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> None:
        self._written.update(watch.written)
        for parameter in watch.written:
            self._sources[parameter].append(f"{name} {list(tensor.shape)}")

    def _not_received(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        if self._pads:
            padding = {}
        else:
            padding = _vocabulary_padding(self._model)
        problems = []
        for name, tensor in parameters.items():
            size = tensor.numel() - padding.get(name, 0)
            if self._written[name] < size:
                sources = ", ".join(self._sources[name]) or "no tensor"
                problems.append(
                    f"{name} (the engine's name) was not sent in full: {self._written[name]} of "
                    f"{size} elements, from {sources}"
                )
        return problems


def _lists_tensors_first(model: torch.nn.Module) -> bool:
    """Whether a model's loader lists all tensors before it places the first."""
    return any(kind.__name__ == "GptOssForCausalLM" for kind in type(model).__mro__)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:  # torch compares no float8
        a = a.view(torch.uint8)
        b = b.view(torch.uint8)
    return torch.equal(a, b)


def _pads_dimensions(model: torch.nn.Module) -> bool:
    """Whether the engine rounded heads or the feed-forward size up, as it does on CPU
    (configs/update_config.py)."""
    config = getattr(model, "config", None)
    originals = (
        ("original_intermediate_size", "intermediate_size"),
        ("original_moe_intermediate_size", "moe_intermediate_size"),
        ("original_num_attention_heads", "num_attention_heads"),
        ("original_total_num_kv_heads", "num_key_value_heads"),
    )
    return any(
        getattr(config, original, None) not in (None, getattr(config, name, None))
        for original, name in originals
    )


def _vocabulary_padding(model: torch.nn.Module) -> dict[str, int]:
    """Elements of the engine's parameters that no checkpoint fills: the engine rounds vocabularies
    up."""
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        weight = getattr(module, "weight", None)
        if indices is not None and weight is not None:
            rows = (
                indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
            )
            padding[f"{name}.weight"] = rows * weight[0].numel()
    return padding


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
    """StrictLoader.take of what weights.bucket.announce describes; buffer: its bytes, if they are
    not in the file at its "path"."""
    places = places_of(message)
    return loader.take_bucket(
        places,
        buffer_of(message, buffer),
        message["purpose"],
        first=message["first"],
        last=message["last"],
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
    buffer = torch.empty(message["size"], dtype=torch.uint8, device=group.device)
    group.broadcast(buffer)
    return message, buffer
