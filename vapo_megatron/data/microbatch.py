"""Packed micro-batches: which samples go together, and the tensors that a model reads.

Zig-zag context parallelism places tokens as follows: every sequence, padded to a multiple of 2 *
cp, is split into 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r, so that causal
attention costs every rank the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.shared_prompts import first_tokens


class Share(Sequence[int]):
    """The samples that a rank computes of a batch, their places in it: what the rank's part of a
    plan comes to.

    Attributes:
        microbatches: places in the batch of the samples of each micro-batch.
        of: how many samples there are on all data-parallel ranks together.
        lengths: of a batch of parts (data/parts.py), MicroBatch.lengths of each micro-batch; None
            where samples are whole.
    """

    def __init__(
        self,
        microbatches: Sequence[Sequence[int]],
        of: int,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.of = of
        self.lengths = lengths
        self._places = sorted(place for members in microbatches for place in members)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._places[index]


class Prefix(NamedTuple):
    """Positions at the beginning of a packed sequence that the micro-batch has in another one.

    start: where they begin in the pack. length: how many; 0: it has all positions itself.
    """

    start: int
    length: int


NO_PREFIX = Prefix(0, 0)


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one forward pass, the part that a context-parallel rank holds (t tokens).

    Position j of a sequence reads token j and predicts token j + 1: its log-prob, or the value of
    the state in which it is chosen. A sequence of n tokens has n - 1 positions. With shared
    prompts, the first of the sequences that begin alike has all its positions, and the others those
    from the last prompt token on.

    Attributes:
        ids, labels: int64 [t].
        response_index: int64 [t], index of the position's label among the batch's response tokens;
            -1 elsewhere.
        lengths: positions of each packed sequence over all CP ranks, padding included, without
            those that it has in another one.
        owners: the number, among the micro-batch's samples, of the one that each packed sequence is
            a segment of.
        experts: uint8 or int16 [t, layers * experts per token], the experts that each position is
            to go through; None lets the model choose.
        prefixes: of each packed sequence; None where all have all their positions.
    """

    ids: Tensor
    labels: Tensor
    response_index: Tensor
    lengths: tuple[int, ...]
    owners: tuple[int, ...]
    experts: Tensor | None = None
    prefixes: tuple[Prefix, ...] | None = None

    @property
    def response_rows(self) -> Tensor:
        """The positions that speak about response tokens, int64; the first one where there is none,
        so that a loss over them still has a gradient to pass on."""
        rows = (self.response_index >= 0).nonzero()[:, 0]
        return rows if len(rows) else torch.zeros(1, dtype=torch.int64)

    def gather(self, values: Tensor) -> Tensor:
        """A tensor over response tokens [T] at this micro-batch's positions [t]; 0 where no
        response token is."""
        placed = self.response_index >= 0
        gathered = values.new_zeros(len(placed))
        gathered[placed] = values[self.response_index[placed]]
        return gathered

    def scatter(self, into: Tensor, values: Tensor) -> None:
        """The other way: write values [t] of response positions into a tensor over response tokens
        [T]."""
        placed = self.response_index >= 0
        into[self.response_index[placed]] = values[placed]


def padded_lengths(lengths: Sequence[int], alignment: int, total_alignment: int) -> list[int]:
    """Positions of each sequence once padded: to `alignment`, the last one so that the sum fits
    `total_alignment`."""
    padded = [-(-max(n, 1) // alignment) * alignment for n in lengths] or [alignment]
    padded[-1] += -sum(padded) % total_alignment
    return padded


def planned_lengths(lengths: Tensor, segments: Tensor | None, alignment: int) -> Tensor:
    """Tokens that samples count as in a plan, which pads each as one sequence: enough for pack(),
    which pads each segment. lengths, segments: int64 [S]; segments None: one each."""
    return lengths if segments is None else lengths + (segments - 1) * (alignment - 1)


def pack(
    batch: ExperienceBatch,
    samples: Sequence[int],
    alignment: int,
    total_alignment: int,
    cp_size: int,
    cp_rank: int,
    experts_per_token: int = 0,
    for_critic: bool = False,
    share_prompts: bool = False,
    *,
    part_of: Sequence[int] | None = None,
) -> MicroBatch:
    """Pack some samples of a batch, each segment of theirs as a sequence. No sample at all gives
    one sequence of padding, which weighs nothing.

    experts_per_token: of a model that is to go through the batch's routed_experts; 0: of one that
        is not.
    for_critic: the privileged tokens of a sample stand before each of its segments.
    share_prompts: samples of one segment that begin alike have the positions of their prompt once.
        Not with context parallelism.
    part_of: of the rank's parts of samples (data/parts.py), the padded positions of each sequence
        that two segments are chunks of.
    """
    segments = [(s, *ends) for s in samples for ends in pairwise(batch.segment_bounds(s))]
    read = batch.privileged_tokens if for_critic else None
    ends = batch.bounds("privileged").tolist()
    privileged = {
        s: batch.tokens[:0] if read is None else read[ends[s] : ends[s + 1]] for s in samples
    }
    positions_of = [len(privileged[s]) + end - first - 1 for s, first, end in segments]
    trunks: list[int | None] = [None] * len(segments)
    if share_prompts:
        assert cp_size == 1, "the chunks of a context-parallel rank have no whole prompt"
        trunks = _trunks(batch, [s for s, *_ in segments], for_critic)
    shared_of = [
        0 if trunk is None else len(privileged[s]) + int(batch.prompt_lengths[s]) - 1
        for (s, *_), trunk in zip(segments, trunks, strict=True)
    ]
    positions_of = [n - shared for n, shared in zip(positions_of, shared_of, strict=True)]
    if part_of is None:
        lengths = padded_lengths(positions_of, alignment, total_alignment)
    else:
        lengths = [length // (2 * cp_size) for length in part_of for _ in range(2)]
    total = sum(lengths)
    ids = torch.zeros(total, dtype=torch.int64)
    labels = torch.zeros(total, dtype=torch.int64)
    response_index = torch.full((total,), -1)
    experts = None
    if experts_per_token and batch.routed_experts is not None:
        # Padding has to go somewhere, through as many experts as any token; a rank without samples
        # has nothing else.
        width = batch.routed_experts.shape[1]
        experts = (
            (torch.arange(width) % experts_per_token)
            .to(batch.routed_experts.dtype)
            .repeat(total, 1)
        )
    # Of a sample once, however many segments it has.
    owner_of = {s: owner for owner, s in enumerate(samples)}
    offsets = {s: int(batch.cu_seqlens[s]) for s in samples}
    numbers = {s: int(batch.response_cu_seqlens[s]) for s in samples}
    places_of = {s: batch.response_places(s) for s in samples}
    experts_of = {s: batch.sample_experts(s) for s in samples}
    start = 0
    starts = []
    for (sample, first, end), n, shared, padded in zip(
        segments, positions_of, shared_of, lengths, strict=False
    ):
        starts.append(start)
        offset = offsets[sample]
        tokens = torch.cat((privileged[sample], batch.tokens[offset + first : offset + end])).long()
        ids[start : start + n] = tokens[shared:-1]
        labels[start : start + n] = tokens[shared + 1 :]
        places = places_of[sample]
        # Places grow: those within the segment are one run.
        begin, stop = torch.searchsorted(places, torch.tensor([first, end])).tolist()
        before = start + len(privileged[sample]) - 1 - shared
        response_index[before - first + places[begin:stop]] = torch.arange(
            numbers[sample] + begin, numbers[sample] + stop
        )
        chosen = experts_of[sample]
        if experts is not None and chosen is not None:
            experts[start : start + n] = chosen[first + shared : first + shared + n]
        start += padded
    owners = tuple(owner_of[s] for s, *_ in segments) or (0,)
    if part_of is not None:
        owners = owners[::2]
        return MicroBatch(ids, labels, response_index, tuple(part_of), owners, experts)
    prefixes = None
    if any(shared_of):
        prefixes = tuple(
            NO_PREFIX if trunk is None else Prefix(starts[trunk], shared)
            for trunk, shared in zip(trunks, shared_of, strict=True)
        )
    local = local_positions(lengths, cp_size, cp_rank)
    return MicroBatch(
        ids[local],
        labels[local],
        response_index[local],
        tuple(lengths),
        owners,
        None if experts is None else experts[local],
        prefixes,
    )


def _trunks(batch: ExperienceBatch, samples: Sequence[int], for_critic: bool) -> list[int | None]:
    """For each packed sequence the earlier one that has the positions of its prompt, None where it
    has them itself. samples: of each sequence; one that is there more than once has segments, which
    share nothing."""
    trunks: list[int | None] = []
    seen: dict[bytes, int] = {}
    sequences_of = Counter(samples)
    for place, sample in enumerate(samples):
        trunk = None
        if sequences_of[sample] == 1:
            tokens = first_tokens(batch, sample, for_critic).numpy().tobytes()
            trunk = seen.setdefault(tokens, place)
        trunks.append(None if trunk == place else trunk)
    return trunks


class Packed(Sequence[MicroBatch]):
    """The micro-batches of a share of a batch, each packed on demand: none takes memory
    before its turn."""

    def __init__(self, batch: ExperienceBatch, share: Share, *how: Any) -> None:
        """how: what pack() is given beside batch and samples."""
        self._batch = batch
        self._share = share
        self._how = how

    def __len__(self) -> int:
        return len(self._share.microbatches)

    def __getitem__(self, index: Any) -> Any:
        lengths = self._share.lengths
        part_of = None if lengths is None else lengths[index]
        return pack(self._batch, self._share.microbatches[index], *self._how, part_of=part_of)


def local_positions(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Positions in natural packed order that a CP rank holds, in the order in which it holds them.
    int64 [T / cp]."""
    if cp == 1:
        return torch.arange(sum(lengths))
    parts = []
    offset = 0
    for n in lengths:
        chunk = n // (2 * cp)
        parts.append(torch.arange(offset + rank * chunk, offset + (rank + 1) * chunk))
        parts.append(torch.arange(offset + n - (rank + 1) * chunk, offset + n - rank * chunk))
        offset += n
    return torch.cat(parts)


def natural_order(lengths: list[int], cp: int) -> Tensor:
    """Index i such that gathered[i] is in natural packed order; gathered is the ranks' tokens, rank
    by rank. [T]."""
    held = torch.cat([local_positions(lengths, cp, rank) for rank in range(cp)])
    return held.argsort()
