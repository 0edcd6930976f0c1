"""States of Megatron's distributed optimizer in the shapes of the parameters, a parameter at a time.

Each data-parallel rank holds a range of most parameters. For a checkpoint that loads at any layout a parameter's states
are put together on one rank, another one for each parameter, so that no rank holds more than its share of them.
Megatron's own way ("fully_reshardable", 0.16.1) puts all of them together on every rank, or on the first: 12 bytes a
parameter of the whole model-parallel shard; and it takes them from wrong places where a buffer has padding between its
parameters. Keys and shapes are the same, so either reads what the other wrote.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from vapo_megatron.mcore.platform import current_platform

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory

# float32 in a checkpoint, whatever the optimizer keeps.
_STATES = ("param", "exp_avg", "exp_avg_sq")
_BYTES = 4 * len(_STATES)
# Host memory of what is read together; a larger parameter is read alone.
_READ_BYTES = 2 << 30


@dataclass(frozen=True)
class WholeParameter:
    """A parameter as a checkpoint sees it.

    Attributes:
        index: among the optimizer's, the same on all data-parallel ranks.
        parameter: this rank's, whole as far as data parallelism goes.
        sharded: its place in the saved model.
        ranges: [start, stop) of the flattened parameter whose states each data-parallel rank holds; may be empty.
    """

    index: int
    parameter: Tensor
    sharded: Sharded
    ranges: tuple[tuple[int, int], ...]

    def states(self, tensors: Mapping[str, Tensor], sharded: Sharded) -> dict[str, Sharded]:
        """Tensors of its shape, by state, as the checkpoint holds them."""
        return {
            name: make_sharded_optimizer_tensor(sharded, tensor, f"optimizer.state.{name}")
            for name, tensor in tensors.items()
        }


def whole_parameters(part: Any, model_state: Mapping[str, Any]) -> list[WholeParameter]:
    """Those of a DistributedOptimizer, in its order. model_state: weights.torch_dist.model_state of the same chunks."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(model_state))
    by_parameter = {id(value.data): value for value in nested_values(sharded)}
    count = part.data_parallel_group.size()
    found: list[WholeParameter] = []
    for buffer in part.buffers:
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            share = bucket.grad_data.numel() // count
            cuts = (min(max(bucket.offset + rank * share, start), stop) - start for rank in range(count + 1))
            ranges = tuple(pairwise(cuts))
            found.append(WholeParameter(len(found), parameter, by_parameter[id(parameter)], ranges))
    return found


def gathered_states(part: Any, model_state: Mapping[str, Any]) -> dict[int, dict[str, Sharded]]:
    """Collective: states to be saved, in host memory, by a parameter's index; each parameter's on one rank of its own.

    Ranks that hold nothing but copies of what others save (tensor-parallel ones of a norm, the last pipeline stage of
    tied embeddings) get none.
    """
    group = part.data_parallel_group
    parameters = whole_parameters(part, model_state)
    # Whoever saves a parameter's states does so as the first of the ranks that hold them.
    box = [[whole.sharded.replica_id for whole in parameters]]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[0], group=group)
    saved, held = {}, [0] * group.size()
    for whole, replica_id in zip(parameters, box[0], strict=True):
        if not is_main_replica(replica_id):
            continue
        owner = held.index(min(held))
        held[owner] += whole.parameter.numel()
        tensors = _gather(part, whole, owner)
        if tensors is not None:
            saved[whole.index] = whole.states(tensors, replace(whole.sharded, replica_id=replica_id))
    return saved


def reads(part: Any, model_state: Mapping[str, Any]) -> list[list[WholeParameter]]:
    """The parameters in portions that are read one after the other, so that a rank holds one portion at a time."""
    portions: list[list[WholeParameter]] = []
    room = 0
    for whole in whole_parameters(part, model_state):
        size = whole.parameter.numel() * _BYTES
        if size > room or not portions:
            portions.append([])
            room = _READ_BYTES
        portions[-1].append(whole)
        room -= size
    return portions


def empty_states(portion: Sequence[WholeParameter]) -> dict[int, dict[str, Sharded]]:
    """What dist_checkpointing.load is to fill."""
    return {
        whole.index: whole.states(
            {name: torch.empty(whole.parameter.shape, dtype=torch.float32) for name in _STATES}, whole.sharded
        )
        for whole in portion
    }


def put_states(part: Any, portion: Sequence[WholeParameter], loaded: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Take this rank's ranges of what was loaded."""
    rank = part.data_parallel_group.rank()
    for whole in portion:
        start, stop = whole.ranges[rank]
        if start == stop:
            continue
        # Megatron sets all states there are, the step counter of torch's Adam among them.
        tensors = dict(part._get_main_param_and_optimizer_states(whole.parameter))
        tensors |= {name: loaded[whole.index][name].flatten()[start:stop] for name in _STATES}
        with torch.no_grad():
            part._set_main_param_and_optimizer_states(whole.parameter, tensors)


def _gather(part: Any, whole: WholeParameter, owner: int) -> dict[str, Tensor] | None:
    """Collective over the data-parallel ranks: states of a parameter in its shape, on the owner; None on others."""
    return dict(_gather_each(part, whole, owner)) or None


def _gather_each(part: Any, whole: WholeParameter, owner: int) -> Iterator[tuple[str, Tensor]]:
    group, device = part.data_parallel_group, current_platform().device
    rank, longest = group.rank(), max(stop - start for start, stop in whole.ranges)
    start, stop = whole.ranges[rank]
    held = part._get_main_param_and_optimizer_states(whole.parameter) if stop > start else {}
    for name in _STATES:
        own = torch.zeros(longest, dtype=torch.float32, device=device)
        if held:
            own[: stop - start].copy_(held[name].detach())
        pieces = [torch.empty_like(own) for _ in whole.ranges] if rank == owner else None
        dist.gather(own, pieces, dst=dist.get_global_rank(group, owner), group=group)
        if pieces is not None:
            cut = [piece[: stop - start] for piece, (start, stop) in zip(pieces, whole.ranges, strict=True)]
            yield name, torch.cat(cut).view(whole.parameter.shape).to("cpu")
