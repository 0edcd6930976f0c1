"""Weight updates, inside the engine, that report what they could not place.

SGLang's models skip names they do not know and report success; they also stack what a checkpoint keeps apart (query,
key and value; gate and up) and cut it over tensor-parallel ranks. Only the model's own loader knows which elements of
which parameter a tensor fills, so it is watched while it copies: a tensor that wrote nothing is unknown, and a
parameter that is not written in full was not sent in full. The same watch, comparing instead of copying, finds tensors
that differ. The answer has checksums of the bytes as they arrived, which the sender compares with its own.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.engines.inside.broadcast_group import Backend, BroadcastGroup, address_towards
from vapo_megatron.weights.bucket import Purpose, checksum, unpack

LOAD_FORMAT = "vapo_strict"
BROADCAST_GROUP = "vapo_weights"

NamedTensor = tuple[str, torch.Tensor]

_JOIN_SECONDS = 600.0
_COPY = torch.ops.aten.copy_.default
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class ParameterWatch(TorchDispatchMode):
    """Counts the elements written into each of a model's parameters; with compare, compares instead of writing.

    Fills of a scalar count; larger ones count only with count_fills, as loaders pad with them, which may hide a tensor
    that is too short.

    written: engine parameter name -> elements. differs: whether a compared element was not equal.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], compare: bool, count_fills: bool) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()}
        self._compare = compare
        self._count_fills = count_fills
        self.start()

    def start(self) -> None:
        """Begin to count for the next tensor."""
        self.written: Counter[str] = Counter()
        self.differs = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        return func(*args, **(kwargs or {}))


class StrictLoader:
    """Takes the buckets of one weight sync after another into one model, or one tensor-parallel rank's part of it.

    checksums: of the tensors of the latest bucket, as they arrived. unknown: the problem lines of its tensors that
    filled nothing on this rank, among them experts of other ranks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.checksums: list[int] = []
        self.unknown: list[str] = []
        # Checksums run beside the copies and outside the watch, which would slow each of their operations.
        self._pool = ThreadPoolExecutor(1, "vapo-checksums")
        self._pads = _pads_dimensions(model)
        self._written: Counter[str] = Counter()
        self._sources: defaultdict[str, list[str]] = defaultdict(list)

    def take(self, tensors: Iterable[NamedTensor], purpose: Purpose, *, first: bool, last: bool) -> list[str]:
        """Load or compare a bucket. Returns one line for each problem.

        first and last mark the ends of a weight sync. The tensors' memory is not needed after the return.
        """
        parameters = dict(self._model.named_parameters())
        self.checksums, self.unknown = [], []
        if first:
            self._written.clear()
            self._sources.clear()
        watch = ParameterWatch(parameters, purpose == "compare", count_fills=self._pads)
        problems = self._watched(iter(tensors), watch)
        if last:
            problems.extend(self._not_received(parameters))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return problems

    def _watched(self, tensors: Iterator[NamedTensor], watch: ParameterWatch) -> list[str]:
        """Feed the model's loader, which places each tensor before it asks for the next, so that each is seen alone."""
        problems: list[str] = []
        current: tuple[str, torch.Tensor] | None = None
        sums: list[Future[int]] = []

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in tensors:
                for late in sums[-2:-1]:
                    late.result()  # three tensors in memory at most, where they are read one by one
                current = (name, tensor)
                watch.start()
                yield current
                sums.append(self._pool.submit(checksum, tensor))
                problems.extend(self._settle(name, tensor, watch))
                current = None

        while True:
            try:
                with watch:
                    self._model.load_weights(feed())  # type: ignore[operator]
            except Exception as error:  # whatever a model's loader raises, report it to the sender
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if current is None:
                    problems.append(f"the engine's loader failed ({reason})")
                    break
                name, tensor = current
                sums.append(self._pool.submit(checksum, tensor))
                self._count(name, tensor, watch)
                problems.append(f"{name} of shape {list(tensor.shape)} does not fit the engine's parameter ({reason})")
                current = None
            else:
                break
        self.checksums = [pending.result() for pending in sums]
        return problems

    def _settle(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> list[str]:
        self._count(name, tensor, watch)
        if not watch.written:
            self.unknown.append(f"{name} of shape {list(tensor.shape)} is not known to the engine")
            return self.unknown[-1:]
        return [f"{name} differs"] if watch.differs else []

    def _count(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> None:
        self._written.update(watch.written)
        for parameter in watch.written:
            self._sources[parameter].append(f"{name} {list(tensor.shape)}")

    def _not_received(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        padding = {} if self._pads else _vocabulary_padding(self._model)
        problems = []
        for name, tensor in parameters.items():
            size = tensor.numel() - padding.get(name, 0)
            if self._written[name] < size:
                sources = ", ".join(self._sources[name]) or "no tensor"
                problems.append(
                    f"{name} (the engine's name) was not sent in full: {self._written[name]} of {size} elements, "
                    f"from {sources}"
                )
        return problems


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:  # torch compares no float8
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)


def _pads_dimensions(model: torch.nn.Module) -> bool:
    """Whether the engine rounded heads or the feed-forward size up, as it does on CPU (configs/update_config.py)."""
    config = getattr(model, "config", None)
    originals = (
        ("original_intermediate_size", "intermediate_size"),
        ("original_moe_intermediate_size", "moe_intermediate_size"),
        ("original_num_attention_heads", "num_attention_heads"),
        ("original_total_num_kv_heads", "num_key_value_heads"),
    )
    return any(
        getattr(config, original, None) not in (None, getattr(config, name, None)) for original, name in originals
    )


def _vocabulary_padding(model: torch.nn.Module) -> dict[str, int]:
    """Elements of the engine's parameters that no checkpoint fills: the engine rounds vocabularies up."""
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        weight = getattr(module, "weight", None)
        if indices is not None and weight is not None:
            rows = indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
            padding[f"{name}.weight"] = rows * weight[0].numel()
    return padding


def install_strict_loading() -> None:
    """Add LOAD_FORMAT to the SGLang of this process, for tensors and broadcasts.

    The answer's message is JSON with the fields of client.LoadAnswer and the problems of all tensor-parallel ranks.
    Success means that there are none.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    loaders: dict[int, StrictLoader] = {}
    from_tensor = WeightUpdater.update_weights_from_tensor

    def loader_of(updater: Any) -> StrictLoader:
        model = updater.get_model()
        return loaders.setdefault(id(model), StrictLoader(model))

    def update_weights_from_tensor(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        if load_format != LOAD_FORMAT:
            return from_tensor(self, named_tensors, load_format)
        loader = loader_of(self)
        return _answer(loader, lambda: take_message(loader, named_tensors, named_tensors.get("buffer")))

    def load_weights_from_distributed(self: Any, received: tuple[dict[str, Any], torch.Tensor | None]) -> Any:
        loader = loader_of(self)
        return _answer(loader, lambda: take_message(loader, *received))

    WeightUpdater.update_weights_from_tensor = update_weights_from_tensor
    WeightUpdater.init_weights_update_group = _join_group
    WeightUpdater.receive_weights_from_distributed = _receive
    WeightUpdater.load_weights_from_distributed = load_weights_from_distributed


def _answer(loader: StrictLoader, load: Callable[[], list[str]]) -> tuple[bool, str]:
    """Runs on every tensor-parallel rank; rank 0 answers for all."""
    from sglang.srt.runtime_context import get_parallel

    start = time.perf_counter()
    try:
        problems = load()
    except Exception as error:  # the scheduler would end, and the other ranks wait for this one
        problems = [f"the weights could not be read ({type(error).__name__}: {str(error).partition(chr(10))[0]})"]
    group = get_parallel().tp_group.cpu_group
    ranks: list[tuple[list[str], list[str], list[int]]] = [([], [], [])] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (problems, loader.unknown, loader.checksums), group=group)
    all_problems = problems_of_ranks([(lines, unknown) for lines, unknown, _ in ranks])
    message = {
        "problems": all_problems,
        "seconds": time.perf_counter() - start,
        "checksums": [checksums for _, _, checksums in ranks],
    }
    return not all_problems, json.dumps(message)


def problems_of_ranks(ranks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The problems of a bucket on a server, from those of its ranks.

    ranks: of each rank its problems, and those of them in StrictLoader.unknown. A tensor that is unknown on some ranks
    only is an expert of another rank.
    """
    placed = {line for _, unknown in ranks for line in unknown if any(line not in there for _, there in ranks)}
    return [line for line in dict.fromkeys(line for lines, _ in ranks for line in lines) if line not in placed]


def take_message(loader: StrictLoader, message: Mapping[str, Any], buffer: torch.Tensor | None = None) -> list[str]:
    """StrictLoader.take of what weights.bucket.announce describes; buffer: see unpack."""
    tensors = unpack(message, buffer)
    return loader.take(tensors, message["purpose"], first=message["first"], last=message["last"])


def _join_group(
    self: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: Backend = "gloo",
) -> tuple[bool, str]:
    """Joins a group, in place of that of an earlier trainer."""
    rank = rank_offset + self.tp_rank
    self._model_update_group.pop(group_name, None)
    try:
        host = address_towards(master_address)
        store = BroadcastGroup.connect(master_address, master_port, world_size, _JOIN_SECONDS)
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        group = BroadcastGroup(store, rank, world_size, _JOIN_SECONDS, host, device)
        self._model_update_group[group_name] = group
    except (RuntimeError, OSError) as error:
        return False, f"{group_name} at {master_address}:{master_port} was not joined: {error}"
    return True, f"joined {group_name} as rank {rank}"


def _receive(self: Any, *, group_name: str, load_format: str, **_: Any) -> tuple[dict[str, Any], torch.Tensor | None]:
    message = json.loads(load_format.removeprefix(f"{LOAD_FORMAT}:"))
    if not message["size"]:
        return message, None
    group = self._model_update_group[group_name]
    buffer = torch.empty(message["size"], dtype=torch.uint8, device=group.device)
    group.broadcast(buffer)
    return message, buffer
