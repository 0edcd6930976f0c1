"""Causal attention over packed sequences, by segments of queries and keys: in padded batches, or in
runs that bound the memory of masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vapo_megatron.data.microbatch import Prefix
from vapo_megatron.models.layers import SINK_CHANNELS

# Mean tokens of packed sequences from which each is attended to on its own rather than in a padded
# batch.
_LONG = 64


class Segment(NamedTuple):
    """A run of queries of one sequence and the keys they attend to: the last query sees the last
    key."""

    q_start: int
    q_length: int
    k_start: int
    k_length: int


def packed_segments(lengths: list[int], cp: int, rank: int) -> list[Segment]:
    """Causal segments of the packed sequences `lengths` (tokens, padding included) that a CP rank
    computes: with cp > 1 each sequence is cut in 2 * cp chunks, of which it holds `rank` and `2 *
        cp - 1 - rank`. Keys are in natural packed
    order, queries in the rank's own."""
    segments = []
    q = 0
    k = 0
    for n in lengths:
        if cp == 1:
            segments.append(Segment(q, n, k, n))
            q += n
        else:
            chunk = n // (2 * cp)
            for index in (rank, 2 * cp - 1 - rank):
                segments.append(Segment(q, chunk, k, (index + 1) * chunk))
                q += chunk
        k += n
    return segments


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and MicroBatch.prefixes."""

    prefixes: Sequence[Prefix] | None = None


def prefixes_of(packed: Any) -> Sequence[Prefix] | None:
    """The prefixes of packed sequences; None without."""
    return packed.prefixes if isinstance(packed, PackedSequences) else None


def segments_after(lengths: Sequence[int], prefixes: Sequence[Prefix]) -> list[Segment]:
    """Causal segments of packed sequences of which some have their first positions in another one.
    Keys are those of with_prefixes."""
    segments = []
    q = 0
    k = 0
    for n, prefix in zip(lengths, prefixes, strict=True):
        keys = prefix.length + n
        segments.append(Segment(q, n, k, keys))
        q += n
        k += keys
    return segments


def with_prefixes(x: Tensor, lengths: Sequence[int], prefixes: Sequence[Prefix]) -> Tensor:
    """Rows of packed sequences [t, ...] with those of its prefix before each of them, [t', ...]."""
    own = x.split(list(lengths))
    starts = [0, *accumulate(lengths)]
    sequence_at = dict(zip(starts, own, strict=False))
    # Cut once for all sequences with it: the backward pass of each cut makes a tensor as large as
    # what it was cut from.
    cut = {prefix: sequence_at[prefix.start][: prefix.length] for prefix in set(prefixes)}
    return torch.cat(
        [rows for prefix, piece in zip(prefixes, own, strict=True) for rows in (cut[prefix], piece)]
    )


def _batches(segments: list[Segment]) -> list[list[int]]:
    """Groups of segments, so that a batch padded to its longest is at most half padding."""
    order = sorted(range(len(segments)), key=lambda i: (segments[i].q_length, segments[i].k_length))
    batches: list[list[int]] = []
    for i in order:
        if batches and segments[i].k_length <= 2 * segments[batches[-1][0]].k_length:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


# A mask has at most so many entries; longer segments are attended to by runs of queries, each with
# the keys that it can see and its mask.
_MASK_ENTRIES = 1 << 24
_FEWEST_ROWS = 256


def _is_long(segment: Segment, window: int | None) -> bool:
    """Whether a segment needs a mask that is not worth its memory."""
    masked = segment.q_length != segment.k_length or (
        window is not None and window < segment.k_length
    )
    return masked and segment.q_length * segment.k_length > _MASK_ENTRIES


def _attend_long(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment: Segment,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one segment [q_length, heads, e] in memory that is linear in its keys.

    A whole mask is quadratic, and torch copies it as floats. Here runs of queries have masks of
    _MASK_ENTRIES, and backward makes them again.
    """
    before = segment.k_length - segment.q_length  # keys before the first query
    if window is None:
        rows = max(1, _MASK_ENTRIES // segment.k_length)
    else:  # longer runs would compute scores that nobody sees
        rows = max(1, min(max(window, _FEWEST_ROWS), _MASK_ENTRIES // (2 * window)))
    outputs = []
    for start in range(0, segment.q_length, rows):
        stop = min(start + rows, segment.q_length)
        first = 0 if window is None else max(0, before + start - window + 1)
        queries = q[segment.q_start + start : segment.q_start + stop]
        visible = slice(segment.k_start + first, segment.k_start + before + stop)
        outputs.append(
            checkpoint(
                _attend_run,
                queries,
                k[visible],
                v[visible],
                before + start - first,
                scale,
                window,
                sinks,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing is random
            )
        )
    return torch.cat(outputs)


def _alone(
    q: Tensor, k: Tensor, v: Tensor, segment: Segment
) -> tuple[Tensor, Tensor, Tensor, list[Segment]]:
    """A segment's own queries, keys and values, and the segment among them."""
    queries = q[segment.q_start : segment.q_start + segment.q_length]
    keys = slice(segment.k_start, segment.k_start + segment.k_length)
    return queries, k[keys], v[keys], [Segment(0, segment.q_length, 0, segment.k_length)]


def _attend_run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of consecutive queries [t, heads, d], the first at this position among the keys."""
    positions = torch.arange(position, position + len(q), device=q.device)[:, None]
    mask = _visible(positions, torch.arange(len(k), device=q.device), window)
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v, mask[None, None], scale, sinks)[0]


def _visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key, by their positions in the sequence, which broadcast."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries [b, heads, t, d], keys, values and the mask [..., t, t'] of attention in which each
    head's sink [heads] is a score beside the keys' scores, without a value.

    It is the score of one more key, the first, whose value is 0. Queries have their head's sink in
    extra channels, where this key has 1 / scale, and all others 0. One more query, the
    first, keeps causal attention causal. Any kernel computes that, with gradients. 1 / scale is
    the sum of two numbers, so that bfloat16 does not round it.
    """
    width = q.shape[-1] + SINK_CHANNELS
    column = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:-1], 2)
    q = F.pad(torch.cat((q, F.pad(column, (0, SINK_CHANNELS - 2))), -1), (0, 0, 1, 0))
    inverse = torch.tensor(1 / scale, dtype=torch.float64)
    high = inverse.to(k.dtype)
    low = (inverse - high.double()).to(k.dtype)
    first = k.new_zeros(*k.shape[:2], 1, width)
    first[..., -SINK_CHANNELS] = high
    first[..., 1 - SINK_CHANNELS] = low
    k = torch.cat((first, F.pad(k, (0, SINK_CHANNELS))), 2)
    # As wide as the queries: torch has kernels without a matrix of all scores for one width alone.
    v = F.pad(v, (0, width - v.shape[-1], 1, 0))
    return q, k, v, None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of q [b, heads, t, d], k [b, kv_heads, t', d], v [b, kv_heads, t', e], causal
    without a mask -> [b, t, heads, e]."""
    channels = v.shape[-1]
    if sinks is not None:
        q, k, v, mask = _with_sink(q, k, v, mask, scale, sinks)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if sinks is not None:
        out = out[:, :, 1:, :channels]
    return out.transpose(1, 2)


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention of sequences of one length: q [b, t, heads, d], k [b, t, kv_heads, d], v [b,
    t, kv_heads, e] -> [b, t, heads, e]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None and window < q.shape[2]:
        positions = torch.arange(q.shape[2], device=q.device)
        mask = _visible(positions[:, None], positions, window)
    return _attend(q, k, v, mask, scale, sinks)


def _attend_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: list[Segment],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of several segments as one padded batch, of q [t, heads, d], k [t', kv_heads, d], v
    [t', kv_heads, e]: rows [sum q_length, heads, e] and where they belong in q. Padding is on the
    right: a causal mask hides it from every real row."""
    device = q.device
    q_index = torch.arange(max(s.q_length for s in segments), device=device)
    k_index = torch.arange(max(s.k_length for s in segments), device=device)
    q_start, q_length, k_start, k_length = torch.tensor(segments, device=device).T[..., None]
    q_at = (q_start + q_index).clamp_max(q.shape[0] - 1)
    k_at = (k_start + k_index).clamp_max(k.shape[0] - 1)
    square = all(s.q_length == s.k_length for s in segments)
    mask = None
    if not square or (window is not None and window < len(k_index)):
        positions = (q_index + (k_length - q_length))[..., None]
        mask = _visible(positions, k_index, window)[:, None]
    queries = _rows_at(q, q_at).transpose(1, 2)
    keys = _rows_at(k, k_at).transpose(1, 2)
    values = _rows_at(v, k_at).transpose(1, 2)
    out = _attend(queries, keys, values, mask, scale, sinks).flatten(0, 1)
    real = (q_index < q_length).flatten().nonzero().squeeze(1)
    return _rows_at(out, real), q_at.flatten()[real]


def _rows_at(x: Tensor, places: Tensor) -> Tensor:
    """x[places], whose backward pass is quicker on a CPU, in float32."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: list[Segment],
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention over packed sequences.

    Args:
        q: [t, heads, d].
        k, v: [t', kv_heads, d] and [t', kv_heads, e], in natural packed order.
        segments: from packed_segments; together they cover q.
        scale: of the scores.
        window: keys that a query sees, its own included; None: its whole past.
        sinks: [heads], a score of each head beside its keys' scores, without a value; None: none.

    Returns:
        [t, heads, e].
    """
    if any(_is_long(segment, window) for segment in segments):
        # One by one: packs of such sequences have few of them.
        return torch.cat(
            [
                _attend_long(q, k, v, segment, scale, window, sinks)
                if _is_long(segment, window)
                else attend_packed(*_alone(q, k, v, segment), scale, window, sinks)
                for segment in segments
            ]
        )
    if all((s.q_start, s.q_length) == (s.k_start, s.k_length) for s in segments):
        lengths = [s.q_length for s in segments]
        if len(set(lengths)) == 1:
            rows = (-1, lengths[0])
            out = _attend_rows(
                q.unflatten(0, rows),
                k.unflatten(0, rows),
                v.unflatten(0, rows),
                scale,
                window,
                sinks,
            )
            return out.flatten(0, 1)
        if len(q) >= _LONG * len(segments):
            # Cutting and joining are cheap, in backward too; indices that pick rows out of a pack
            # are not.
            whole = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat(
                [
                    _attend_rows(a[None], b[None], c[None], scale, window, sinks)[0]
                    for a, b, c in whole
                ]
            )
    outputs, places = zip(
        *(
            _attend_batch(q, k, v, [segments[i] for i in batch], scale, window, sinks)
            for batch in _batches(segments)
        ),
        strict=True,
    )
    return _rows_at(torch.cat(outputs), torch.cat(places).argsort())
