"""The training state of a Trainable as one sharded state dict: weights, optimizer and schedule, for
any layout.

Optimizer states are saved in the shapes of the parameters, under keys that begin with "optimizer.",
so that they load at another tensor, pipeline, context or data-parallel size. Each data-parallel
rank holds a range of most parameters. A parameter's states are gathered on one rank, a different
one for each parameter, so that no rank holds more than its share. Megatron's own way
("fully_reshardable", 0.16.1) puts all of them together on every rank, or on the first, which takes
12 bytes a parameter of the whole model-parallel shard; and it reads them from wrong places where a
buffer has padding between its parameters. Keys and shapes are the same, so either can read what the
other wrote.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.optim import Adam

from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights.bucket import batches
from vapo_megatron.weights.torch_dist import model_state, put_model_state

# The progress in an optimizer's parameter group. Everything else in it comes from the config.
_PROGRESS = ("params", "step")
_STATES = "param_state"

Load = Callable[[dict[str, Any]], dict[str, Any]]


def training_state(trainable: Trainable) -> dict[str, Any]:
    """Collective: the state that dist_checkpointing saves; weights alone for a model without an
    optimizer."""
    state = _state(trainable)
    weights = {key: value for key, value in state.items() if key.startswith("model")}
    for part, saved in _optimizer_states(trainable, state):
        # A rank that saves none has no entry: an empty one would count as common to all ranks.
        if states := gathered_states(part, weights):
            saved[_STATES] = states
    return state


def load_training_state(trainable: Trainable, load: Load) -> None:
    """Collective: load a prepared (or frozen) model; optimizer states are read in portions.
    Learning rates and decay follow the current config, at the step that was saved. load:
    collective; fills a sharded state dict, as dist_checkpointing.load does."""
    loaded = load(_state(trainable))
    put_model_state(trainable.chunks, loaded)
    if trainable.optimizer is None:
        return
    for part, saved in _optimizer_states(trainable, loaded):
        groups = part.optimizer.param_groups
        settings = [
            {key: value for key, value in group.items() if key not in _PROGRESS} for group in groups
        ]
        _load(part, saved)
        for group, before in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(before)
    trainable.scheduler.num_steps = loaded["scheduler"]["num_steps"]
    trainable.scheduler.step(0)
    del loaded
    weights = model_state(trainable.chunks)
    for part in _parts(trainable):
        _load_states(part, weights, load)


def _state(trainable: Trainable) -> dict[str, Any]:
    """Everything but the states that ranks hold in parts."""
    state = model_state(trainable.chunks)
    if trainable.optimizer is None:
        return state
    parts = _parts(trainable)
    for part in parts:
        # Megatron can neither save nor load an optimizer without states, and itself creates them by
        # making a step.
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, Adam):
            _set_steps(part.optimizer)
    if len(parts) > 1:
        trainable.optimizer._synchronize_steps()
    states = _group_states(parts)
    state["optimizer"] = states[0] if len(states) == 1 else dict(enumerate(states))
    state["scheduler"] = {"num_steps": trainable.scheduler.num_steps}
    return state


def _optimizer_states(
    trainable: Trainable, state: dict[str, Any]
) -> list[tuple[Any, dict[str, Any]]]:
    """Each optimizer of a model with its entry of a state dict."""
    if trainable.optimizer is None:
        return []
    parts = _parts(trainable)
    states = state["optimizer"]
    return [
        (part, states if len(parts) == 1 else states[index]) for index, part in enumerate(parts)
    ]


def _load_states(part: Any, weights: dict[str, Any], load: Load) -> None:
    """Collective: read one portion of the parameters after another, so that a rank holds one
    portion at a time. All ranks read equally often, although pipeline stages differ in size."""
    portions = list(
        batches(whole_parameters(part, weights), lambda whole: whole.nbytes, _READ_BYTES)
    )
    most = torch.tensor(len(portions), device=current_platform().device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for number in range(int(most)):
        portion = portions[number] if number < len(portions) else []
        empty = {whole.index: whole.states(whole.empty(), whole.sharded) for whole in portion}
        put_states(part, portion, load({_STATES: empty}).get(_STATES, {}))


def _parts(trainable: Trainable) -> list[Any]:
    """Megatron's optimizers of a model: one, or one for its dense part and one for its experts."""
    chained = getattr(trainable.optimizer, "chained_optimizers", None) or [trainable.optimizer]
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _group_states(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Megatron's state_dict() of each optimizer: its parameter groups, with the number of steps.

    An optimizer without parameters on this rank, as the experts' on a pipeline stage of dense
    layers, counts no steps: Megatron cannot save torch's Adam then, and saves a fused one without
    their number. A checkpoint has the groups of rank 0, which may be such a rank, so the number is
    the other optimizer's on this rank: both make every step.
    """
    states = [part.state_dict() if _has_parameters(part) else None for part in parts]
    counted = [state["optimizer"]["param_groups"][0] for state in states if state is not None]
    progress = {key: value for group in counted for key, value in group.items() if key == "step"}
    return [
        {"optimizer": {"param_groups": _empty_groups(part, progress)}} if state is None else state
        for part, state in zip(parts, states, strict=True)
    ]


def _has_parameters(part: Any) -> bool:
    return any(group["params"] for group in part.optimizer.param_groups)


def _empty_groups(part: Any, progress: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of an optimizer without parameters."""
    groups = part.optimizer.state_dict()["param_groups"]
    return [
        {key: value for key, value in group.items() if key != "params"} | progress
        for group in groups
    ]


def _set_steps(inner: Adam) -> None:
    """torch's Adam counts steps in a tensor of each parameter."""
    for values in inner.state.values():
        step = values.get("step")
        # A separate tensor each: one that all of them shared would count a step for every
        # parameter.
        values["step"] = torch.zeros(()) if step is None else step.detach().clone()


def _load(part: Any, state: dict[str, Any]) -> None:
    """Megatron's load_state_dict, with the step counters that each Adam wants."""
    inner = part.optimizer
    part.load_state_dict(
        {key: value for key, value in state.items() if not key.startswith(_STATES)}
    )
    if isinstance(inner, Adam):
        _set_steps(inner)
    for group in inner.param_groups:
        if "step" in group:
            # Fused ones take no float, and torch's Adam saves one
            group["step"] = int(group["step"])


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's, torch's and Megatron's generators;
    torch.load(weights_only=True) reads it."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if current_platform().is_cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore rng_state()."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory

# float32 in a checkpoint, whatever the optimizer keeps.
_SAVED = ("param", "exp_avg", "exp_avg_sq")
_BYTES = 4 * len(_SAVED)
# Host memory of the parameters read together; a larger parameter is read alone.
_READ_BYTES = 2 << 30
# Bytes gathered at once, which take twice as much of the device; a larger parameter is gathered
# alone.
_GATHERED_BYTES = 256 << 20


@dataclass(frozen=True)
class WholeParameter:
    """A parameter as a checkpoint sees it: its index in the optimizer, the same on all
    data-parallel ranks; this rank's parameter, whole with respect to data parallelism; its place in
    the saved model; and the range [start, stop) of the flattened parameter whose states each
    data-parallel rank holds, possibly empty."""

    index: int
    parameter: Tensor
    sharded: Sharded
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its states in a checkpoint."""
        return self.parameter.numel() * _BYTES

    def empty(self) -> dict[str, Tensor]:
        """Tensors that its states are read into."""
        return {name: torch.empty(self.parameter.shape, dtype=torch.float32) for name in _SAVED}

    def states(self, tensors: Mapping[str, Tensor], sharded: Sharded) -> dict[str, Sharded]:
        """Tensors of its shape, by state, as the checkpoint holds them."""
        return {
            name: make_sharded_optimizer_tensor(sharded, tensor, f"optimizer.state.{name}")
            for name, tensor in tensors.items()
        }


def whole_parameters(part: Any, model_state: Mapping[str, Any]) -> list[WholeParameter]:
    """The parameters of an optimizer, in its order. model_state: weights.torch_dist.model_state of
    the same chunks."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(model_state))
    by_parameter = {id(value.data): value for value in nested_values(sharded)}
    count = part.data_parallel_group.size()
    parameters: list[WholeParameter] = []
    for buffer in part.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // count
            cuts = (
                min(max(bucket.offset + rank * share, start), stop) - start
                for rank in range(count + 1)
            )
            ranges = tuple(pairwise(cuts))
            parameters.append(
                WholeParameter(len(parameters), parameter, by_parameter[id(parameter)], ranges)
            )
    return parameters


def gathered_states(part: Any, model_state: Mapping[str, Any]) -> dict[int, dict[str, Sharded]]:
    """Collective: the states to be saved, in host memory, by parameter index; each parameter's
    states are on one rank. Ranks that only hold copies of what others save (tensor-parallel ones of
    a norm, the last pipeline stage of tied embeddings) get none."""
    group = part.data_parallel_group
    parameters = whole_parameters(part, model_state)
    # Whoever saves a parameter's states does so as the first of the ranks that hold them.
    box = [[whole.sharded.replica_id for whole in parameters]]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[0], group=group)
    placed: list[tuple[WholeParameter, int]] = []
    held = [0] * group.size()
    for whole, replica_id in zip(parameters, box[0], strict=True):
        if is_main_replica(replica_id):
            owner = held.index(min(held))
            held[owner] += whole.parameter.numel()
            placed.append(
                (replace(whole, sharded=replace(whole.sharded, replica_id=replica_id)), owner)
            )
    saved: dict[int, dict[str, Sharded]] = {}
    for batch in batches(placed, lambda pair: pair[0].nbytes, _GATHERED_BYTES):
        saved |= _gather(part, batch)
    return saved


def put_states(
    part: Any, portion: Sequence[WholeParameter], loaded: Mapping[int, Mapping[str, Tensor]]
) -> None:
    """Copy this rank's ranges of loaded states into the optimizer."""
    rank = part.data_parallel_group.rank()
    for whole in portion:
        start, stop = whole.ranges[rank]
        if start == stop:
            continue
        # Megatron sets all states there are, the step counter of torch's Adam among them.
        tensors = dict(part._get_main_param_and_optimizer_states(whole.parameter))
        tensors |= {name: loaded[whole.index][name].flatten()[start:stop] for name in _SAVED}
        with torch.no_grad():
            part._set_main_param_and_optimizer_states(whole.parameter, tensors)


def _gather(
    part: Any, batch: Sequence[tuple[WholeParameter, int]]
) -> dict[int, dict[str, Sharded]]:
    """Collective over the data-parallel ranks, one exchange: the states of parameters, in host
    memory, each on its owner. A rank sends only its parts, ordered by owner, parameter and
    state."""
    group = part.data_parallel_group
    device = current_platform().device
    rank = group.rank()
    pieces = [torch.empty(0, dtype=torch.float32, device=device)]
    sent = [0] * group.size()
    for receiver in range(group.size()):
        for whole, owner in batch:
            start, stop = whole.ranges[rank]
            if owner == receiver and stop > start:
                held = part._get_main_param_and_optimizer_states(whole.parameter)
                pieces += [
                    held[name].detach().flatten().to(device, torch.float32) for name in _SAVED
                ]
                sent[receiver] += len(_SAVED) * (stop - start)
    mine = [whole for whole, owner in batch if owner == rank]
    received = [
        len(_SAVED) * sum(stop - start for start, stop in (w.ranges[r] for w in mine))
        for r in range(len(sent))
    ]
    came = torch.empty(sum(received), dtype=torch.float32, device=device)
    dist.all_to_all_single(came, torch.cat(pieces), received, sent, group=group)
    streams = list(came.to("cpu").split(received))

    def take(sender: int, count: int) -> Tensor:
        values, streams[sender] = streams[sender][:count], streams[sender][count:]
        return values

    states = {}
    for whole in mine:
        cut = [
            {name: take(sender, stop - start) for name in _SAVED}
            for sender, (start, stop) in enumerate(whole.ranges)
        ]
        tensors = {
            name: torch.cat([piece[name] for piece in cut]).view(whole.parameter.shape)
            for name in _SAVED
        }
        states[whole.index] = whole.states(tensors, whole.sharded)
    return states
