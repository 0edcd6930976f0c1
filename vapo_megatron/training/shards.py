"""Distribution of a step's samples over ranks.

Every rank has the global table: rewards, lengths and every other number of all samples. The tokens
of a sample, and all fields by token, are on its owner alone, where advantages and returns are
computed. A model may run elsewhere: its input is sent to the ranks of its layout, to
context-parallel ranks in parts (training/part_exchange.py), and its outputs are returned to the
owners. Sums over all samples (denominators, whitening, metrics) use per-sample
numbers gathered on every rank, in the same order, so that no result depends on which rank owns a
sample.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.collectives import broadcast_value, on_rank_zero
from vapo_megatron.data.batch import OVER, ExperienceBatch, SampleTable, stretches
from vapo_megatron.data.microbatch import Share
from vapo_megatron.data.parts import written_out
from vapo_megatron.data.shared_prompts import prompt_numbers, shared_prompts
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.training.exchange import NO_SAMPLES, Samples, exchange, rank_and_world
from vapo_megatron.training.part_exchange import ALWAYS_SENT, PartExchange, Received

T = TypeVar("T")

_BY_TOKENS = ("tokens", "positions", "response_tokens", "privileged")


@dataclass(frozen=True)
class ModelInput:
    """The samples that a model computes in one call, as this rank sees them.

    Attributes:
        batch: the samples that this rank computes.
        share: their micro-batches.
        global_table: the per-sample fields of the samples of all ranks.
        local_indices: int64, the rows of `global_table` that the samples of `batch` have.
        output_samples: by rank, the numbers of the samples, or of parts, whose outputs it has.
        owned: by rank, the numbers of the input's samples that it owns, ascending.
        received: with context parallelism, the parts that the samples of `batch` are; None where
            they are whole.
    """

    batch: ExperienceBatch
    share: Share
    global_table: SampleTable
    local_indices: Tensor
    output_samples: Sequence[Samples]
    owned: Sequence[Samples]
    received: Received | None = None


class ShardedBatch:
    """S samples, each owned by one rank.

    Attributes:
        table: the per-sample fields of all samples, on every rank.
        local: the samples that this rank owns.
    """

    def __init__(self, table: SampleTable, boundaries: Samples, local: ExperienceBatch) -> None:
        """boundaries: int64 [ranks + 1], the first sample of each rank (`partition_by_tokens`)."""
        self.table = table
        self.local = local
        self._boundaries = boundaries
        self._rank, self._world = rank_and_world()
        self._prompt_numbers: dict[bool, Tensor] = {}

    @property
    def samples(self) -> int:
        """S."""
        return self.table.samples

    @property
    def response_tokens(self) -> int:
        """T, of all samples."""
        return int(self.table.response_lengths.sum())

    @property
    def local_slice(self) -> slice:
        """The numbers of the samples that this rank owns."""
        return slice(int(self._boundaries[self._rank]), int(self._boundaries[self._rank + 1]))

    def fill(self, **by_samples: Tensor | None) -> None:
        """Set per-sample fields [S], which every rank has computed alike."""
        for name, values in by_samples.items():
            setattr(self.table, name, values)
            setattr(self.local, name, None if values is None else values[self.local_slice])

    def gather_samples(self, local: Tensor) -> Tensor:
        """Collective: [local S, ...] of each rank's samples as [S, ...] on every rank."""
        if self._world == 1:
            return local
        gathered = torch.zeros(self.samples, *local.shape[1:], dtype=local.dtype)
        gathered[self.local_slice] = local
        dist.all_reduce(gathered)  # a row is 0 on all ranks but one, so that the sum is exact
        return gathered

    def sum_over_ranks(self, local: Tensor) -> Tensor:
        """Collective: the sum over ranks, in place."""
        if self._world > 1:
            dist.all_reduce(local)
        return local

    def model_input(
        self, model: Trainable | Probe, samples: Sequence[int], *names: str
    ) -> ModelInput:
        """Collective: what this rank computes of some samples with a model; with a probe, those
        that it owns.

        names: the fields by token that are sent beside tokens and rollout log-probs, where they are
            filled in.
        """
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        chooses_all = len(chosen) == self.samples
        if chooses_all:
            global_table = self.table
        else:
            global_table = self.table.select(chosen)
        if isinstance(model, Probe):
            return self._local_input(chosen, global_table)

        mesh = model.mesh
        is_critic = model.name == "critic"
        if is_critic:
            lengths = global_table.critic_lengths
        else:
            lengths = global_table.lengths
        shared = None
        if model.shares_prompts:
            prompts = self._prompts_of_all(is_critic)[chosen]
            shared = shared_prompts(prompts, global_table, is_critic)
        plan = model.plan(lengths, range(global_table.samples), global_table.segments, shared)
        numbers = chosen.numpy()
        computed = [numbers[plan.samples_of(dp_rank)] for dp_rank in range(mesh.dp_size)]
        owned = self._owners_of(numbers)
        local_indices = torch.from_numpy(plan.samples_of(mesh.dp_rank))
        places = np.full(global_table.samples, -1, dtype=np.int64)
        places[local_indices.numpy()] = np.arange(len(local_indices))
        microbatches = [places[members].tolist() for members in plan[mesh.dp_rank]]
        received: Received | None = None
        packed_lengths: Sequence[Sequence[int]] | None = None
        if mesh.cp_size > 1:
            exchange_of_parts = PartExchange(model, self.table, owned, computed)
            source = written_out(self.local) if is_critic else self.local
            first = self.local_slice.start
            received = exchange_of_parts.send(source, first, microbatches, names)
            batch = received.batch
            packed_lengths = received.lengths
            output_samples = received.output_parts
        else:
            fields = self._receive_samples(model, computed, names)
            batch = global_table.select(local_indices).batch(**fields)
            output_samples = [NO_SAMPLES] * self._world
            for dp_rank in range(mesh.dp_size):
                output_samples[mesh.reporter(dp_rank)] = computed[dp_rank]
        share = Share(microbatches, global_table.samples, packed_lengths)
        return ModelInput(
            batch, share, global_table, local_indices, output_samples, owned, received
        )

    def _prompts_of_all(self, for_critic: bool) -> Tensor:
        """Collective in the first call: prompt_numbers of all samples, whose groups are whole on
        their owners: int64 [S]."""
        if for_critic not in self._prompt_numbers:
            local = prompt_numbers(self.local, for_critic) + self.local_slice.start
            self._prompt_numbers[for_critic] = self.gather_samples(local)
        return self._prompt_numbers[for_critic]

    def _receive_samples(
        self, model: Trainable, computed: Sequence[Samples], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Collective: fields over tokens of the samples that this rank's replica computes."""
        fields = ["segment_starts", *ALWAYS_SENT, *names]
        if model.replays:
            fields.append("routed_experts")
        if model.name == "critic":
            fields.append("privileged_tokens")
        sent = self._filled(*fields)
        wanted = [computed[model.mesh.dp_rank_of(rank)] for rank in range(self._world)]
        return exchange(sent, _rows(self.table, sent), self._owned(), wanted)

    def _local_input(self, chosen: Tensor, global_table: SampleTable) -> ModelInput:
        output_samples = [
            chosen[(chosen >= first) & (chosen < end)].numpy()
            for first, end in pairwise(self._boundaries.tolist())
        ]
        owned = self._owners_of(chosen.numpy())
        first = self.local_slice.start
        is_local = (chosen >= first) & (chosen < self.local_slice.stop)
        local_indices = is_local.nonzero().squeeze(1)
        batch = self.local
        if global_table is not self.table:
            batch = self.local.select((chosen[local_indices] - first).tolist())
        share = Share([range(len(local_indices))], global_table.samples)
        return ModelInput(batch, share, global_table, local_indices, output_samples, owned)

    def owned_samples(self, model_input: ModelInput) -> ExperienceBatch:
        """The samples of an input that this rank owns, ascending, without what models alone read
        (hidden states, experts)."""
        local = replace(self.local, hidden_states=None, routed_experts=None)
        return local.select(self._mine(model_input).tolist())

    def return_to_owner(self, model_input: ModelInput, outputs: Tensor) -> Tensor:
        """Collective: a model's outputs on an input, on the owners of its samples: [T of
        owned_samples, ...]."""
        reports = len(model_input.output_samples[self._rank]) > 0
        reported = outputs if reports else outputs[:0]
        if model_input.received is not None:
            local = self.local
            returned = model_input.received.return_to_owner(reported, local.response_tokens)
            return stretches(returned, local.response_cu_seqlens, self._mine(model_input))
        sent = {"outputs": reported}
        rows = {"outputs": self.table.response_lengths}
        return exchange(sent, rows, model_input.output_samples, model_input.owned)["outputs"]

    def gather_on_rank0(self, count: int, *names: str) -> dict[str, Tensor]:
        """Collective: fields of the first samples on rank 0, where they are filled in; no rows on
        the others."""
        sent = self._filled(*names)
        if not sent:
            return {}
        wanted = _only_on_rank0(count, self._world)
        return exchange(sent, _rows(self.table, sent), self._owned(), wanted)

    def run_on_rank0(self, function: Callable[[ExperienceBatch], T]) -> T:
        """Collective: the result of a function of all samples with their tokens, on every rank.

        Rank 0 gets all fields and calls it. Its exceptions are raised on every rank.
        """
        by_tokens = (name for name in OVER if OVER[name] in _BY_TOKENS and name != "hidden_states")
        fields = self.gather_on_rank0(self.samples, *by_tokens)
        return on_rank_zero(lambda: function(self.table.batch(**fields)))

    def scatter_token_columns(
        self, function: Callable[[ExperienceBatch], Tensor], columns: int
    ) -> Tensor:
        """Collective: as run_on_rank0, of a function that returns [T, columns]: [local T, columns]
        on each rank."""
        returned = [torch.zeros(0, columns)]

        def call(batch: ExperienceBatch) -> None:
            returned[0] = function(batch)

        self.run_on_rank0(call)
        sent = {"returned": returned[0]}
        rows = {"returned": self.table.response_lengths}
        held = _only_on_rank0(self.samples, self._world)
        return exchange(sent, rows, held, self._owned())["returned"]

    def _filled(self, *names: str) -> dict[str, Tensor]:
        fields = {name: getattr(self.local, name) for name in names}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def _owned(self) -> list[Samples]:
        return _between(self._boundaries)

    def _mine(self, model_input: ModelInput) -> Tensor:
        """The places among `local` of the input's samples, int64."""
        return torch.from_numpy(model_input.owned[self._rank] - self.local_slice.start)

    def _owners_of(self, samples: Samples) -> list[Samples]:
        """By rank, those of some samples that it owns, ascending."""
        ascending = np.sort(samples)
        return np.split(ascending, np.searchsorted(ascending, self._boundaries[1:-1]))


def _between(boundaries: Samples) -> list[Samples]:
    return [np.arange(first, end) for first, end in pairwise(boundaries.tolist())]


def _only_on_rank0(samples: int, world: int) -> list[Samples]:
    return [np.arange(samples), *[NO_SAMPLES] * (world - 1)]


def _rows(table: SampleTable, names: Iterable[str]) -> dict[str, Tensor]:
    """The number of rows that each sample has in some fields, int64 [S]."""
    return {name: table.rows(OVER[name]) for name in names}


def partition_by_tokens(table: SampleTable, ranks: int) -> Samples:
    """The first sample that each rank owns, int64 [ranks + 1]: about as many tokens each, groups
    whole."""
    lengths = table.lengths.numpy()
    groups = table.group_ids.numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    tokens_before = np.concatenate(([0], lengths.cumsum()))
    total = tokens_before[-1]
    nearest = np.searchsorted(tokens_before[starts], total * np.arange(1, ranks) / ranks)
    inner = np.append(starts, table.samples)[nearest]
    boundaries: Samples = np.concatenate(([0], inner, [table.samples])).astype(np.int64)
    return boundaries


def scatter(batch: ExperienceBatch | None) -> ShardedBatch:
    """Collective: rank 0's batch (the others pass None), each sample on its owner."""
    _, world = rank_and_world()
    if world == 1:
        assert batch is not None, "rank 0 has the batch"
        return ShardedBatch(batch.table(), partition_by_tokens(batch.table(), 1), batch)
    sent: dict[str, Tensor] = {}
    message = None
    if batch is not None:
        sent = {name: t for name, t in batch.tensors().items() if OVER[name] in _BY_TOKENS}
        kinds = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in sent.items()}
        message = (batch.table(), kinds)
    table, kinds = broadcast_value(message)
    if batch is None:
        sent = {name: torch.zeros(0, *shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    boundaries = partition_by_tokens(table, world)
    held = _only_on_rank0(table.samples, world)
    received = exchange(sent, _rows(table, sent), held, _between(boundaries))
    return read_local(table, boundaries, lambda local: table.select(local).batch(**received))


def read_local(
    table: SampleTable, boundaries: Samples, batch_of: Callable[[Tensor], ExperienceBatch]
) -> ShardedBatch:
    """The shards of samples that every rank can read: batch_of reads those that it owns, int64."""
    rank, _ = rank_and_world()
    owned = torch.arange(int(boundaries[rank]), int(boundaries[rank + 1]))
    return ShardedBatch(table, boundaries, batch_of(owned))
