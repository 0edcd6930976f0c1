"""Weight updates, inside the engine, that say what they could not place.

SGLang's models skip names they do not know and report success; they also stack what a checkpoint keeps apart (query,
key and value; gate and up) and cut it over tensor-parallel ranks. So the one place where it is known which elements
of which engine parameter a tensor of the checkpoint fills is the model's own loader, and here it is watched while it
copies: a tensor that wrote nothing is unknown, a parameter that is not written in full was forgotten by the sender.
The same watch, with the copies held back and compared, tells which tensors differ.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.rollout.weight_bucket import unpack

LOAD_FORMAT = "vapo_strict"

_COPY = torch.ops.aten.copy_.default
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class ParameterWatch(TorchDispatchMode):
    """Counts the elements written into each of a model's parameters; compares instead of writing where told to.

    Fills are counted where a scalar is set, and else only with count_fills: loaders pad with them, which may hide a
    tensor that is too short.

    written: engine parameter name -> elements. differs: whether a compared element was not equal.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], compare: bool, count_fills: bool) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()}
        self._compare = compare
        self._count_fills = count_fills
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
                    self.differs |= not torch.equal(args[0], expected)
                    return args[0]
        return func(*args, **(kwargs or {}))


class StrictLoader:
    """Takes the buckets of one hand-over after another into one model, or one tensor-parallel rank's part of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._pads = _pads_dimensions(model)
        self._written: Counter[str] = Counter()
        self._sources: defaultdict[str, list[str]] = defaultdict(list)

    def take(self, payload: dict[str, Any]) -> list[str]:
        """Load or compare a bucket (weight_bucket.WeightBuffer.pack). Returns one line for each thing that is wrong.

        The tensors' memory is not needed any more when this returns.
        """
        parameters = dict(self._model.named_parameters())
        compare = payload["purpose"] == "compare"
        if payload["first"]:
            self._written.clear()
            self._sources.clear()
        problems = []
        for name, tensor in unpack(payload):
            watch = ParameterWatch(parameters, compare, count_fills=self._pads)
            problem = self._take_one(name, tensor, watch)
            self._written.update(watch.written)
            for parameter in watch.written:
                self._sources[parameter].append(f"{name} {list(tensor.shape)}")
            if problem is not None:
                problems.append(problem)
        if payload["last"]:
            problems.extend(self._not_received(parameters))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return problems

    def _take_one(self, name: str, tensor: torch.Tensor, watch: ParameterWatch) -> str | None:
        shape = list(tensor.shape)
        try:
            with watch:
                self._model.load_weights([(name, tensor)])  # type: ignore[operator]
        except Exception as error:  # whatever a model's loader raises, the sender is to hear of it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"{name} of shape {shape} does not fit the engine's parameter ({reason})"
        if not watch.written:
            return f"{name} of shape {shape} is not known to the engine"
        if watch.differs:
            return f"{name} differs"
        return None

    def _not_received(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        padding = {} if self._pads else _vocabulary_padding(self._model)
        problems = []
        for name, tensor in parameters.items():
            wanted = tensor.numel() - padding.get(name, 0)
            if self._written[name] < wanted:
                sources = ", ".join(self._sources[name]) or "no tensor"
                problems.append(
                    f"{name} (the engine's name) was not sent in full: {self._written[name]} of {wanted} elements, "
                    f"from {sources}"
                )
        return problems


def _pads_dimensions(model: torch.nn.Module) -> bool:
    """Whether the engine rounded heads or the feed-forward size up, as it does on CPU (configs/update_config.py)."""
    config = getattr(model, "config", None)
    originals = (
        ("original_intermediate_size", "intermediate_size"),
        ("original_num_attention_heads", "num_attention_heads"),
        ("original_total_num_kv_heads", "num_key_value_heads"),
    )
    return any(
        getattr(config, original, None) not in (None, getattr(config, name, None)) for original, name in originals
    )


def _vocabulary_padding(model: torch.nn.Module) -> dict[str, int]:
    """Elements of the engine's parameters that no checkpoint fills: it rounds the rows of a vocabulary up."""
    padding = {}
    for name, module in model.named_modules():
        indices = getattr(module, "shard_indices", None)
        weight = getattr(module, "weight", None)
        if indices is not None and weight is not None:
            rows = indices.num_elements_padded - indices.num_org_elements - indices.num_added_elements
            padding[f"{name}.weight"] = rows * weight[0].numel()
    return padding


def install_strict_loading() -> None:
    """Teach this process's SGLang the load format LOAD_FORMAT of /update_weights_from_tensor.

    The answer's message is a JSON list of what is wrong, on any tensor-parallel rank; success means there is nothing.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater.update_weights_from_tensor = _with_strict_format(WeightUpdater.update_weights_from_tensor)


def _with_strict_format(update: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
    from sglang.srt.runtime_context import get_parallel

    loaders: dict[int, StrictLoader] = {}

    def update_weights_from_tensor(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        if load_format != LOAD_FORMAT:
            return update(self, named_tensors, load_format)
        model = self.get_model()
        problems = loaders.setdefault(id(model), StrictLoader(model)).take(named_tensors)
        problems = _over_ranks(problems, get_parallel().tp_group.cpu_group)
        return not problems, json.dumps(problems)

    return update_weights_from_tensor


def _over_ranks(problems: list[str], group: dist.ProcessGroup) -> list[str]:
    """The problems of all tensor-parallel ranks: rank 0 alone answers."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, problems, group=group)
    return list(dict.fromkeys(problem for rank in gathered for problem in rank))
