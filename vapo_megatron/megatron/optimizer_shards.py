"""States of Megatron's distributed optimizer in the shapes of the parameters, a parameter at a time.

Each data-parallel rank holds a range of most parameters. For a checkpoint that loads at any layout a parameter's states
are put together on one rank, another one for each parameter, so that no rank holds more than its share of them.
Megatron's own way ("fully_reshardable", 0.16.1) puts all of them together on every rank, or on the first: 12 bytes a
parameter of the whole model-parallel shard; and it takes them from wrong places where a buffer has padding between its
parameters. Keys and shapes are the same, so either reads what the other wrote.
"""

from collections.abc import Mapping, Sequence
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

from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.bucket import batches

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory

# float32 in a checkpoint, whatever the optimizer keeps.
_STATES = ("param", "exp_avg", "exp_avg_sq")
_BYTES = 4 * len(_STATES)
# Host memory of what is read together; a larger parameter is read alone.
_READ_BYTES = 2 << 30
# Of the device, twice, of what is gathered together; a larger parameter is gathered alone.
_GATHERED_BYTES = 256 << 20


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

    @property
    def nbytes(self) -> int:
        """Of its states in a checkpoint."""
        return self.parameter.numel() * _BYTES

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
    placed: list[tuple[WholeParameter, int]] = []
    held = [0] * group.size()
    for whole, replica_id in zip(parameters, box[0], strict=True):
        if is_main_replica(replica_id):
            owner = held.index(min(held))
            held[owner] += whole.parameter.numel()
            placed.append((replace(whole, sharded=replace(whole.sharded, replica_id=replica_id)), owner))
    saved: dict[int, dict[str, Sharded]] = {}
    for batch in batches(placed, lambda pair: pair[0].nbytes, _GATHERED_BYTES):
        saved |= _gather(part, batch)
    return saved


def reads(part: Any, model_state: Mapping[str, Any]) -> list[list[WholeParameter]]:
    """The parameters in portions that are read one after the other, so that a rank holds one portion at a time."""
    return list(batches(whole_parameters(part, model_state), lambda whole: whole.nbytes, _READ_BYTES))


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


def _gather(part: Any, batch: Sequence[tuple[WholeParameter, int]]) -> dict[int, dict[str, Sharded]]:
    """Collective over the data-parallel ranks: states of parameters, in host memory, each on its owner; one exchange.

    A rank sends what it holds and no more, for each owner parameter by parameter, and of a parameter state by state.
    """
    group, device = part.data_parallel_group, current_platform().device
    rank, pieces, sent = group.rank(), [torch.empty(0, dtype=torch.float32, device=device)], [0] * group.size()
    for receiver in range(group.size()):
        for whole, owner in batch:
            start, stop = whole.ranges[rank]
            if owner == receiver and stop > start:
                held = part._get_main_param_and_optimizer_states(whole.parameter)
                pieces += [held[name].detach().flatten().to(device, torch.float32) for name in _STATES]
                sent[receiver] += len(_STATES) * (stop - start)
    own = [whole for whole, owner in batch if owner == rank]
    received = [
        len(_STATES) * sum(stop - start for start, stop in (w.ranges[r] for w in own)) for r in range(len(sent))
    ]
    came = torch.empty(sum(received), dtype=torch.float32, device=device)
    dist.all_to_all_single(came, torch.cat(pieces), received, sent, group=group)
    streams = [_Stream(part_of_rank) for part_of_rank in came.to("cpu").split(received)]
    found = {}
    for whole in own:
        cut = [
            {name: stream.take(stop - start) for name in _STATES}
            for stream, (start, stop) in zip(streams, whole.ranges, strict=True)
        ]
        tensors = {name: torch.cat([piece[name] for piece in cut]).view(whole.parameter.shape) for name in _STATES}
        found[whole.index] = whole.states(tensors, whole.sharded)
    return found


class _Stream:
    """Numbers that a rank sent, taken from the front."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def take(self, count: int) -> Tensor:
        """The next ones."""
        taken, self._values = self._values[:count], self._values[count:]
        return taken
