"""Cuts samples into the parts that context-parallel ranks compute of them.

Rank r of cp computes chunks r and 2 * cp - 1 - r of each sequence (data/microbatch.py). For the
positions of a chunk it needs their tokens and one more, which the last of them predicts. A chunk
with that token is to its positions what a segment is to its own: n + 1 tokens, n positions. The
part of a sample is therefore a sample, with two segments (one a chunk) for each sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from vapo_megatron.algorithms.segments import segment_sum
from vapo_megatron.data.batch import ExperienceBatch, Over, SampleTable, offsets


@dataclass(frozen=True)
class Parts:
    """The parts of some samples of a batch: cp a sample, one sample's after the other's.

    Attributes:
        chunks: int64 [parts], the number of chunks of each, two a sequence; C of all.
        tokens: int64 [C, 2], where each chunk begins and ends among the batch's tokens.
        responses: int64 [C, 2], the same of the response tokens that it predicts.
        samples: int64 [C], the sample of each.
    """

    chunks: Tensor
    tokens: Tensor
    responses: Tensor
    samples: Tensor

    @property
    def sizes(self) -> Tensor:
        """int64 [C, 2], tokens and response tokens of each chunk."""
        return torch.cat((self.tokens.diff(), self.responses.diff()), dim=1)

    def rows(self, over: Over) -> Tensor:
        """The rows of the parts, in their order, in a tensor over tokens of a kind: int64."""
        if over == "response_tokens":
            return _ranges(self.responses)
        rows = _ranges(self.tokens)
        if over == "tokens":
            return rows
        # A sample's last token has no row, but may end a chunk: no position reads that row.
        tokens = self.tokens.diff()[:, 0]
        rows = rows - self.samples.repeat_interleave(tokens)
        last = segment_sum(tokens, offsets(self.chunks)).cumsum(0) - 1
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[last] = False
        return rows[kept]

    def take(self, values: Tensor, over: Over) -> Tensor:
        """What the parts have of a tensor over tokens of a kind."""
        rows = self.rows(over)
        if over == "positions":
            rows = rows.clamp(max=len(values) - 1)
        return values[rows]

    def tokens_before(self, starts: Tensor) -> Tensor:
        """Response tokens of each part that lie before a place in the tensors over response tokens:
        int64 [S of the batch] -> [parts]."""
        first, end = self.responses.unbind(1)
        before = torch.minimum(starts[self.samples], end) - first
        return segment_sum(before.clamp(min=0), offsets(self.chunks))


def cut(batch: ExperienceBatch, samples: Sequence[int], padded: Tensor, cp: int) -> Parts:
    """Cut samples into parts.

    Args:
        batch: has the samples as a model reads them (written_out).
        samples: their numbers in the batch.
        padded: int64, positions of each of their sequences, padding included.
        cp: parts of a sample.
    """
    ranks = torch.arange(cp)
    held = torch.stack((ranks, 2 * cp - 1 - ranks), dim=1)
    edges = torch.arange(2 * cp + 1)
    none = torch.zeros(0, 2, dtype=torch.int64)
    tokens = [none]
    responses = [none]
    counts = []
    done = 0
    for sample in samples:
        bounds = torch.tensor(batch.segment_bounds(sample))
        sequences = len(bounds) - 1
        counts.append(sequences)
        chunk = padded[done : done + sequences, None] // (2 * cp)
        done += sequences
        # Where chunks begin and end among the sample's tokens, [sequences, 2 cp + 1]
        borders = bounds[:-1, None] + torch.minimum(chunk * edges, bounds.diff()[:, None] - 1)
        predicted = torch.searchsorted(batch.response_places(sample), borders + 1)
        starts, ends = borders[:, held], borders[:, held + 1]
        tokens.append(batch.cu_seqlens[sample] + _by_part(starts, ends + 1))
        starts, ends = predicted[:, held], predicted[:, held + 1]
        responses.append(batch.response_cu_seqlens[sample] + _by_part(starts, ends))
    sequences_of = torch.tensor(counts, dtype=torch.int64)
    owners = torch.tensor(samples, dtype=torch.int64).repeat_interleave(2 * cp * sequences_of)
    chunks_of = (2 * sequences_of).repeat_interleave(cp)
    return Parts(chunks_of, torch.cat(tokens), torch.cat(responses), owners)


def joined(
    table: SampleTable,
    sizes: Tensor,
    chunks: Tensor,
    window_starts: Tensor | None,
    fields: Mapping[str, Tensor],
) -> ExperienceBatch:
    """A batch of parts.

    Args:
        table: of their samples.
        sizes, chunks: as of Parts.
        window_starts: int64 [parts], Parts.tokens_before the samples' window_starts; None without.
        fields: tensors over tokens, as Parts.take gives them. Without loss_mask the response tokens
            of a chunk are its last ones.
    """
    tokens, predicted = sizes.unbind(1)
    bounds = offsets(chunks)
    lengths, response_lengths = segment_sum(sizes[:, 0], bounds), segment_sum(predicted, bounds)
    total = int(lengths.sum())
    ends = tokens.cumsum(0)
    begins = torch.zeros(total, dtype=torch.bool)
    begins[ends - tokens] = True
    mask = fields.get("loss_mask")
    if mask is None:
        mask = torch.arange(total) >= (ends - predicted).repeat_interleave(tokens)
    segment_starts = begins.clone()
    segment_starts[offsets(lengths)[:-1]] = False
    of_parts = replace(
        table,
        prompt_lengths=lengths - response_lengths,
        response_lengths=response_lengths,
        observation_lengths=torch.zeros_like(lengths),
        segments=chunks,
        privileged_lengths=None,
        window_starts=window_starts,
    )
    # The first token of a chunk is predicted by the chunk before
    marks = {"loss_mask": mask & ~begins, "segment_starts": segment_starts}
    return of_parts.batch(**{**fields, **marks})


def written_out(batch: ExperienceBatch) -> ExperienceBatch:
    """A batch as its critic reads it: each sample's privileged tokens before each of its
    segments."""
    read = batch.privileged_tokens
    if read is None:
        return batch
    ends = batch.bounds("privileged").tolist()
    no_mark = torch.zeros(0, dtype=torch.bool)
    tokens = [batch.tokens[:0]]
    masks = [no_mark]
    starts = [no_mark]
    for sample, offset in enumerate(batch.cu_seqlens[:-1].tolist()):
        before = read[ends[sample] : ends[sample + 1]]
        bounds = batch.segment_bounds(sample)
        written = torch.zeros(bounds[-1], dtype=torch.bool)
        written[batch.response_places(sample)] = True
        for first, end in pairwise(bounds):
            tokens += [before, batch.tokens[offset + first : offset + end]]
            masks += [torch.zeros(len(before), dtype=torch.bool), written[first:end]]
            start = torch.zeros(len(before) + end - first, dtype=torch.bool)
            start[0] = first > 0
            starts.append(start)
    lengths = batch.table().critic_lengths
    return replace(
        batch,
        tokens=torch.cat(tokens),
        cu_seqlens=offsets(lengths),
        loss_mask=torch.cat(masks),
        segment_starts=torch.cat(starts),
        observation_lengths=lengths - batch.prompt_lengths - batch.response_lengths,
        privileged_tokens=None,
        privileged_lengths=None,
        routed_experts=None,
    )


def _by_part(starts: Tensor, ends: Tensor) -> Tensor:
    """Bounds of chunks [sequences, cp, 2] in the order of parts, int64 [chunks, 2]."""
    return torch.stack((starts, ends), dim=3).transpose(0, 1).reshape(-1, 2)


def _ranges(bounds: Tensor) -> Tensor:
    """The numbers from bounds[i, 0] to bounds[i, 1], one range after the other: int64 [n, 2]."""
    lengths = bounds.diff()[:, 0]
    shifts = bounds[:, 0] - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
