"""How the samples of a step are spread over the ranks.

Every rank knows the numbers of all samples (rewards, lengths); the fields of a sample's tokens are on its home rank
alone, where advantages and returns are computed. A sample is sent to the rank that runs a model on it, and the result
is sent home. Sums over all samples (denominators, whitening, metrics) use the numbers that every rank has, in the same
order, so that they do not depend on which rank a sample is on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.collectives import broadcast_value, on_rank_zero
from vapo_megatron.data.batch import OVER, ExperienceBatch, SampleTable, offsets, stretches
from vapo_megatron.data.microbatch import Share
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable

Samples = NDArray[np.int64]


def seat() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 where there are no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def exchange(
    fields: Mapping[str, Tensor], rows: Mapping[str, Tensor], held: Sequence[Samples], wanted: Sequence[Samples]
) -> dict[str, Tensor]:
    """Collective: the rows of the samples that this rank wants, in that order.

    From host memory to host memory, over the CPU's backend: the GPUs may belong to the engines.

    Args:
        fields: [rows, ...] of the samples that this rank holds; of one dtype and row shape on all ranks.
        rows: int64 [S], how many rows of each field a sample has, of all S samples by number.
        held: the samples of each rank in the order in which its fields have them; no sample is held twice.
        wanted: the samples that each rank wants; some rank holds each.
    """
    rank, ranks = seat()
    holder, place = np.full((2, len(next(iter(rows.values())))), -1, dtype=np.int64)
    for sender, samples in enumerate(held):
        holder[samples], place[samples] = sender, np.arange(len(samples))
    sends = [place[samples[holder[samples] == rank]] for samples in wanted]
    bounds = {name: offsets(rows[name][torch.from_numpy(held[rank])]) for name in fields}
    messages = [
        [stretches(field, bounds[name], torch.from_numpy(places)) for name, field in fields.items()] for places in sends
    ]
    if ranks == 1:
        return dict(zip(fields, messages[0], strict=True))
    row_bytes = {name: field[:0].new_empty(1, *field.shape[1:]).nbytes for name, field in fields.items()}
    order = np.argsort(holder[wanted[rank]], kind="stable")
    arrived = torch.from_numpy(wanted[rank][order])
    comes = arrived.split(np.bincount(holder[wanted[rank]], minlength=ranks).tolist())
    sizes = [[int(rows[name][s].sum()) * row_bytes[name] for name in fields] for s in comes]
    sent = torch.cat([_bytes(part) for message in messages for part in message])
    received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
    dist.all_to_all_single(
        received, sent, [sum(of_rank) for of_rank in sizes], [sum(part.nbytes for part in m) for m in messages]
    )
    del sent
    parts = received.split([size for of_rank in sizes for size in of_rank])
    found = {}
    for number, (name, field) in enumerate(fields.items()):
        joined = torch.cat(parts[number :: len(fields)]).view(field.dtype).view(-1, *field.shape[1:])
        found[name] = stretches(joined, offsets(rows[name][arrived]), torch.from_numpy(np.argsort(order)))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


T = TypeVar("T")
_BY_TOKENS = ("tokens", "positions", "response_tokens", "privileged")


@dataclass(frozen=True)
class Part:
    """The samples that a rank runs a model on.

    Attributes:
        batch: the samples of this rank's share.
        share: this rank's part of the plan.
        whole: what goes by samples, of all ranks' samples.
        mine: int64, the places of the batch's samples in `whole`.
        reported: the samples whose outputs each rank has, of all.
    """

    batch: ExperienceBatch
    share: Share
    whole: SampleTable
    mine: Tensor
    reported: Sequence[Samples]


class ShardedBatch:
    """S samples on all ranks.

    Attributes:
        table: what goes by samples, of all of them.
        own: the samples that are at home on this rank.
    """

    def __init__(self, table: SampleTable, homes: Samples, own: ExperienceBatch) -> None:
        """homes: int64 [ranks + 1], the first sample of each rank, see cut()."""
        self.table, self.own, self._homes = table, own, homes
        self._rank, self._ranks = seat()

    @property
    def samples(self) -> int:
        """S."""
        return self.table.samples

    @property
    def response_tokens(self) -> int:
        """T, of all samples."""
        return int(self.table.response_lengths.sum())

    @property
    def at_home(self) -> slice:
        """The numbers of the samples that are at home on this rank."""
        return slice(int(self._homes[self._rank]), int(self._homes[self._rank + 1]))

    def fill(self, **by_samples: Tensor | None) -> None:
        """Set fields that go by samples [S], which every rank has found alike."""
        for name, values in by_samples.items():
            setattr(self.table, name, values)
            setattr(self.own, name, None if values is None else values[self.at_home])

    def everywhere(self, found: Tensor) -> Tensor:
        """Collective: results of the samples at home on each rank, [own S, ...], as [S, ...] on every rank."""
        if self._ranks == 1:
            return found
        whole = torch.zeros(self.samples, *found.shape[1:], dtype=found.dtype)
        whole[self.at_home] = found
        dist.all_reduce(whole)  # each is 0 but on one rank: the sum is exact
        return whole

    def summed(self, found: Tensor) -> Tensor:
        """Collective: the sum over ranks."""
        if self._ranks > 1:
            dist.all_reduce(found)
        return found

    def part(self, model: Trainable | Probe, samples: Sequence[int], *names: str) -> Part:
        """Collective: what this rank computes of some samples with a model; with a probe, those at home.

        names: the fields by tokens that are sent beside tokens and rollout log-probs, where they are filled in.
        """
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        whole = self.table if len(chosen) == self.samples else self.table.select(chosen)
        if isinstance(model, Probe):
            return self._part_at_home(chosen, whole)
        is_critic, mesh = model.name == "critic", model.mesh
        lengths = whole.critic_lengths if is_critic else whole.lengths
        plan = model.plan(lengths, range(whole.samples), whole.segments)
        numbers = chosen.numpy()
        samples_of_ranks = [numbers[plan.samples_of(d)] for d in range(mesh.dp_size)]
        held = [
            *("routed_experts",) * model.replays,
            *("privileged_tokens",) * is_critic,
            "tokens",
            "loss_mask",
            "segment_starts",
            "rollout_logprobs",
            *names,
        ]
        sent = {name: tensor for name in held if (tensor := getattr(self.own, name)) is not None}
        of_ranks = [samples_of_ranks[mesh.dp_rank_of(rank)] for rank in range(self._ranks)]
        received = exchange(sent, _rows(self.table, sent), _held(self._homes), of_ranks)
        mine = torch.from_numpy(plan.samples_of(mesh.dp_rank))
        places = np.full(whole.samples, -1, dtype=np.int64)
        places[mine.numpy()] = np.arange(len(mine))
        share = Share([places[members].tolist() for members in plan[mesh.dp_rank]], whole.samples)
        reported = [np.zeros(0, dtype=np.int64)] * self._ranks
        for dp_rank in range(mesh.dp_size):
            reported[mesh.reporter(dp_rank)] = samples_of_ranks[dp_rank]
        return Part(whole.select(mine).batch(**received), share, whole, mine, reported)

    def _part_at_home(self, chosen: Tensor, whole: SampleTable) -> Part:
        reported = [chosen[(chosen >= a) & (chosen < b)].numpy() for a, b in pairwise(self._homes.tolist())]
        first, end = self.at_home.start, self.at_home.stop
        mine = ((chosen >= first) & (chosen < end)).nonzero().squeeze(1)
        batch = self.own if whole is self.table else self.own.select((chosen[mine] - first).tolist())
        return Part(batch, Share([range(len(mine))], whole.samples), whole, mine, reported)

    def bring_home(self, part: Part, outputs: Tensor) -> Tensor:
        """Collective: what a model found of a part of all samples, at home: [own T, ...]."""
        sent = {"outputs": outputs if len(part.reported[self._rank]) else outputs[:0]}
        lengths = {"outputs": self.table.response_lengths}
        return exchange(sent, lengths, part.reported, _held(self._homes))["outputs"]

    def first(self, count: int, *names: str) -> dict[str, Tensor]:
        """Collective: fields of the first samples on rank 0, those that are filled in; nothing on the others."""
        sent = {name: tensor for name in names if (tensor := getattr(self.own, name)) is not None}
        if not sent:
            return {}
        return exchange(sent, _rows(self.table, sent), _held(self._homes), _on_rank_zero_alone(count, self._ranks))

    def on_whole(self, work: Callable[[ExperienceBatch], T]) -> T:
        """Collective: what a function that has to see all tokens returns, on every rank.

        It is called on rank 0, which is sent all fields. Raises what it raises, on every rank.
        """
        sent = self.first(
            self.samples, *(name for name in OVER if name != "hidden_states" and OVER[name] in _BY_TOKENS)
        )
        return on_rank_zero(lambda: work(self.table.batch(**sent)))

    def columns_of_whole(self, work: Callable[[ExperienceBatch], Tensor], columns: int) -> Tensor:
        """Collective: as on_whole, of a function that returns [T, columns]: [own T, columns] on each rank."""
        box = [torch.zeros(0, columns)]

        def call(batch: ExperienceBatch) -> None:
            box[0] = work(batch)

        self.on_whole(call)
        lengths, held = {"returned": self.table.response_lengths}, _on_rank_zero_alone(self.samples, self._ranks)
        return exchange({"returned": box[0]}, lengths, held, _held(self._homes))["returned"]


def _held(homes: Samples) -> list[Samples]:
    return [np.arange(first, end) for first, end in pairwise(homes.tolist())]


def _on_rank_zero_alone(samples: int, ranks: int) -> list[Samples]:
    return [np.arange(samples), *[np.zeros(0, dtype=np.int64)] * (ranks - 1)]


def _rows(table: SampleTable, names: Iterable[str]) -> dict[str, Tensor]:
    """How many rows of some fields each sample has, int64 [S]."""
    return {name: table.rows(OVER[name]) for name in names}


def cut(table: SampleTable, ranks: int) -> Samples:
    """The first sample that is at home on each rank, int64 [ranks + 1]: about as many tokens each, groups whole."""
    lengths, groups = table.lengths.numpy(), table.group_ids.numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    before = np.concatenate(([0], lengths.cumsum()))
    nearest = np.searchsorted(before[starts], before[-1] * np.arange(1, ranks) / ranks)
    inner = np.append(starts, table.samples)[nearest]
    bounds: Samples = np.concatenate(([0], inner, [table.samples])).astype(np.int64)
    return bounds


def scatter(batch: ExperienceBatch | None) -> ShardedBatch:
    """Collective: rank 0's batch (others pass None), each sample at home on one rank."""
    ranks = seat()[1]
    if ranks == 1:
        assert batch is not None, "rank 0 has the batch"
        return ShardedBatch(batch.table(), cut(batch.table(), 1), batch)
    sent = {} if batch is None else {name: t for name, t in batch.tensors().items() if OVER[name] in _BY_TOKENS}
    kinds = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in sent.items()}
    table, kinds = broadcast_value((batch.table(), kinds) if batch is not None else None)
    homes = cut(table, ranks)
    sent = sent or {name: torch.zeros(0, *shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    received = exchange(sent, _rows(table, sent), _on_rank_zero_alone(table.samples, ranks), _held(homes))
    return at_home(table, homes, lambda own: table.select(own).batch(**received))


def at_home(table: SampleTable, homes: Samples, batch_of: Callable[[Tensor], ExperienceBatch]) -> ShardedBatch:
    """The shards of samples that every rank can read: batch_of gives it those that are at home with it, int64."""
    rank = seat()[0]
    return ShardedBatch(table, homes, batch_of(torch.arange(int(homes[rank]), int(homes[rank + 1]))))
