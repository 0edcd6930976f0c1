"""Sends context-parallel ranks their parts of samples (data/parts.py), and their outputs back.

Part r of sample s has number s * cp + r. An owner cuts its samples by the padding of their
micro-batches, which the ranks that compute them know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.algorithms.segments import segment_sum
from vapo_megatron.data.batch import OVER, ExperienceBatch, SampleTable, offsets
from vapo_megatron.data.parts import Parts, cut, joined
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.training.exchange import NO_SAMPLES, Samples, exchange, rank_and_world

ALWAYS_SENT = ("tokens", "loss_mask", "rollout_logprobs")


@dataclass(frozen=True)
class Received:
    """The parts that a rank computes, and how their outputs return.

    Attributes:
        batch: a sample for each part.
        lengths: positions of the packed sequences of each micro-batch over all context-parallel
            ranks, padding included.
        parts: those of the samples that this rank owns.
        rows: int64 [S * cp], response tokens of each part that this rank computes or owns.
        owned: by rank, the parts of the samples that it owns.
        output_parts: by rank, the parts whose outputs it has.
    """

    batch: ExperienceBatch
    lengths: Sequence[Sequence[int]]
    parts: Parts
    rows: Tensor
    owned: Sequence[Samples]
    output_parts: Sequence[Samples]

    def return_to_owner(self, outputs: Tensor, response_tokens: int) -> Tensor:
        """Collective: outputs of a part's response tokens, at those of the samples that this rank
        owns, of which it has `response_tokens`."""
        rows = {"outputs": self.rows}
        returned = exchange({"outputs": outputs}, rows, self.output_parts, self.owned)["outputs"]
        placed = returned.new_zeros(response_tokens, *returned.shape[1:])
        placed[self.parts.rows("response_tokens")] = returned
        return placed


@dataclass(frozen=True)
class PartExchange:
    """The ranks between which the samples of a model's input go.

    Attributes:
        model: computes them.
        table: of all samples of the step.
        owned: by rank, the samples of the input that it owns, ascending.
        computed: by data-parallel rank, the samples that it computes.
    """

    model: Trainable
    table: SampleTable
    owned: Sequence[Samples]
    computed: Sequence[Samples]

    def send(
        self,
        source: ExperienceBatch,
        first: int,
        microbatches: Sequence[Sequence[int]],
        names: Sequence[str],
    ) -> Received:
        """Collective: the parts that this rank computes.

        Args:
            source: the samples that this rank owns, as the model reads them (written_out).
            first: the number of the first of them.
            microbatches: of this rank, places among the samples that it computes.
            names: the fields over tokens that are sent beside ALWAYS_SENT, where they are filled
                in.
        """
        rank, world = rank_and_world()
        mesh = self.model.mesh
        cp = mesh.cp_size
        samples = (self.owned[rank] - first).tolist()
        padded, lengths = self._padded(source, samples, microbatches)
        parts = cut(source, samples, padded, cp)
        owned = [_parts_of(owner, range(cp), cp) for owner in self.owned]
        wanted = [
            _parts_of(computed, [mesh.cp_rank_of(other)], cp)
            for other, computed in enumerate(self._wanted)
        ]
        chunks = (2 * self._sequences).repeat_interleave(cp)
        facts = _exchange_sizes(source, parts, chunks, owned, wanted)

        mine = torch.from_numpy(wanted[rank])
        rows = torch.zeros(len(chunks), 2, dtype=torch.int64)
        rows[torch.from_numpy(owned[rank])] = _totals(parts.sizes, parts.chunks)
        rows[mine] = _totals(facts["sizes"], chunks[mine])
        tokens, responses = rows.unbind(1)
        rows_over = {"tokens": tokens, "positions": tokens - 1, "response_tokens": responses}
        experts = ("routed_experts",) * self.model.replays
        sent = {
            name: parts.take(values, OVER[name])
            for name in (*experts, *ALWAYS_SENT, *names)
            if (values := getattr(source, name)) is not None
        }
        received = exchange(sent, {name: rows_over[OVER[name]] for name in sent}, owned, wanted)
        samples_here = self.table.select(torch.from_numpy(self._wanted[rank]))
        batch = joined(samples_here, facts["sizes"], chunks[mine], facts.get("window"), received)
        return Received(batch, lengths, parts, responses, owned, self._output_parts(world))

    @cached_property
    def _wanted(self) -> list[Samples]:
        """By rank, the samples that it computes parts of."""
        _, world = rank_and_world()
        return [self.computed[self.model.mesh.dp_rank_of(rank)] for rank in range(world)]

    @property
    def _sequences(self) -> Tensor:
        """Sequences of each sample, int64 [S]."""
        if self.table.segments is None:
            return torch.ones(self.table.samples, dtype=torch.int64)
        return self.table.segments

    def _padded(
        self,
        source: ExperienceBatch,
        samples: Sequence[int],
        microbatches: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Sequence[Sequence[int]]]:
        """Collective: positions, padding included, of each sequence of the samples that this rank
        owns, and of each micro-batch that it computes."""
        rank, world = rank_and_world()
        mesh = self.model.mesh
        rows = {"positions": self._sequences}
        bounds = [pairwise(source.segment_bounds(sample)) for sample in samples]
        owned = torch.tensor(
            [end - start - 1 for ends in bounds for start, end in ends], dtype=torch.int64
        )
        positions = exchange({"positions": owned}, rows, self.owned, self._wanted)["positions"]
        of_sample = torch.arange(len(positions)).split(
            self._sequences[torch.from_numpy(self._wanted[rank])].tolist()
        )
        lengths = []
        padded = torch.zeros_like(positions)
        for members in microbatches:
            sequences = torch.cat([positions[:0], *(of_sample[place] for place in members)])
            length = self.model.padded(positions[sequences].tolist())
            padded[sequences] = torch.tensor(length[: len(sequences)], dtype=torch.int64)
            lengths.append(length)
        told = [NO_SAMPLES] * world
        for dp_rank, computed in enumerate(self.computed):
            told[mesh.reporter(dp_rank)] = computed
        returned = exchange({"positions": padded}, rows, told, self.owned)["positions"]
        return returned, lengths

    def _output_parts(self, world: int) -> list[Samples]:
        mesh = self.model.mesh
        output_parts = [NO_SAMPLES] * world
        for dp_rank, computed in enumerate(self.computed):
            for cp_rank in range(mesh.cp_size):
                output_parts[mesh.reporter(dp_rank, cp_rank)] = _parts_of(
                    computed, [cp_rank], mesh.cp_size
                )
        return output_parts


def _exchange_sizes(
    source: ExperienceBatch,
    parts: Parts,
    chunks: Tensor,
    owned: Sequence[Samples],
    wanted: Sequence[Samples],
) -> dict[str, Tensor]:
    """Collective: `sizes` of the parts that this rank computes and, in a run of windows, `window`,
    the response tokens that no update is to train on again."""
    facts = {"sizes": parts.sizes}
    rows = {"sizes": chunks}
    if source.window_starts is not None:
        starts = source.response_cu_seqlens[:-1] + source.window_starts
        facts["window"] = parts.tokens_before(starts)
        rows["window"] = torch.ones_like(chunks)
    return exchange(facts, rows, owned, wanted)


def _parts_of(samples: Samples, ranks: Sequence[int], cp: int) -> Samples:
    return (samples[:, None] * cp + np.array(ranks)).ravel()


def _totals(sizes: Tensor, chunks: Tensor) -> Tensor:
    """Tokens and response tokens of each part, int64 [parts, 2], from those of chunks."""
    bounds = offsets(chunks)
    return torch.stack([segment_sum(column, bounds) for column in sizes.unbind(1)], dim=1)
