"""Core attention for machines without Transformer Engine: packed sequences, context parallelism, a
window, rotary table and scale of each layer's own.

Megatron's own DotProductAttention does not support context parallelism and packed sequences; this
one replaces it in its layer spec.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vapo_megatron.data.microbatch import local_positions, natural_order
from vapo_megatron.models.layers import SINK_CHANNELS, SelfAttention
from vapo_megatron.models.rotary import PositionScale


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.interleaved, -1), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels = 2 * cos.shape[-1]
    result[..., channels:] = x[..., channels:]
    real, imaginary = _parts(x[..., :channels], interleaved)
    out_real, out_imaginary = _parts(result[..., :channels], interleaved)
    torch.mul(real, cos, out=out_real).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=out_imaginary).addcmul_(real, sin, value=sign)
    return result


def _parts(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the real and the imaginary parts."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    real, imaginary = x.chunk(2, -1)
    return real, imaginary


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first 2 * n channels of x [t, heads, d] by angles given as cos and sin [t, 1, n];
    the others stay.

    interleaved: whether real and imaginary part of a pair are neighbours; otherwise they are n
        channels apart.
    """
    turned: Tensor = _Rotate.apply(x, cos, sin, interleaved)
    return turned


class RotaryTables:
    """Cosines and sines of a context-parallel rank's positions, shared by the layers of a model."""

    def __init__(
        self,
        inv_freq: Tensor,
        cp_size: int,
        cp_rank: int,
        interleaved: bool = False,
        query_scale: PositionScale | None = None,
    ) -> None:
        """inv_freq: float32 [n], angle between neighbouring positions. interleaved: see rotate.
        query_scale: of queries, after they are turned."""
        self._inv_freq = inv_freq
        self._cp = (cp_size, cp_rank)
        self._query_scale = query_scale
        self._factors: Tensor | None = None
        self.interleaved = interleaved
        self._key: weakref.ref[Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def turn(self, query: Tensor, key: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [t, heads, d] and keys [t, kv_heads, d] at their positions in the sequences."""
        cos, sin = self.of(cu_seqlens, query.dtype)
        query = rotate(query, cos, sin, self.interleaved)
        key = rotate(key, cos, sin, self.interleaved)
        return query if self._factors is None else query * self._factors, key

    def of(self, cu_seqlens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [t, 1, n] in dtype, on the device of cu_seqlens [sequences + 1]. They are cached for
        as long as cu_seqlens is the same tensor, which must not be changed."""
        last = self._key() if self._key is not None else None
        if last is not cu_seqlens or self._tables is None or self._tables[0].dtype != dtype:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            positions = torch.cat([torch.arange(n) for n in lengths])[
                local_positions(lengths, *self._cp)
            ]
            angles = torch.outer(positions.float(), self._inv_freq)[:, None]
            device = cu_seqlens.device
            self._tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
            if self._query_scale is not None:
                factors = self._query_scale.of(positions)[:, None, None]
                self._factors = factors.to(device, dtype)
            self._key = weakref.ref(cu_seqlens)
        return self._tables


# Mean tokens of packed sequences from which each is attended to on its own rather than in a padded
# batch.
_LONG = 64


class _GatherSequence(torch.autograd.Function):
    """[t, ...] on each rank -> [cp * t, ...] rank by rank; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad, group=ctx.group)
        return out, None


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
    queries = q[q_at].transpose(1, 2)
    keys = k[k_at].transpose(1, 2)
    values = v[k_at].transpose(1, 2)
    out = _attend(queries, keys, values, mask, scale, sinks)
    real = q_index < q_length
    return out[real], q_at[real]


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
    return torch.cat(outputs)[torch.cat(places).argsort()]


def _of_one_width(*rows: Tensor) -> list[Tensor]:
    """Queries, keys and values with channels of zeros where others are wider: torch has kernels
    without a matrix of all scores for one width alone."""
    width = max(x.shape[-1] for x in rows)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in rows]


class SDPACoreAttention(MegatronModule):
    """Megatron's core attention on torch's scaled_dot_product_attention: packed (thd), causal,
    context-parallel. With rotary tables it first rotates queries and keys; with a window a query
    sees only so many keys; with sinks each head has a learnt score without a value, under the name
    that Megatron's own core attention has for it."""

    rotary: RotaryTables | None = None
    window: int | None = None
    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp = pg_collection.cp
        self.tp_group = pg_collection.tp
        self.register_parameter("softmax_offset", None)
        self.scale = softmax_scale or config.kv_channels**-0.5

    def configure(self, attention: SelfAttention, rotary: RotaryTables | None) -> None:
        """Take a layer's own numbers. rotary: its tables, shared by the layers with the same."""
        self.rotary = rotary
        self.window = attention.window
        self.scale = attention.softmax_scale
        if attention.sinks:
            heads = attention.num_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=self.config.params_dtype)
            )
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For megatron.core.dist_checkpointing."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query [t, heads, d], key [t, kv_heads, d], value [t, kv_heads, e] of this CP rank -> [t,
        heads * e]."""
        size = self.cp.size()
        rank = self.cp.rank()
        cu = packed_seq_params.cu_seqlens_q_padded
        if cu is None:
            cu = packed_seq_params.cu_seqlens_q
        lengths = (cu[1:] - cu[:-1]).tolist()
        if self.rotary is not None:
            query, key = self.rotary.turn(query, key, cu)
        if size > 1:
            widths = (key.shape[-1], value.shape[-1])
            joined = _GatherSequence.apply(torch.cat((key, value), dim=-1), self.cp)
            joined = joined[natural_order(lengths, size).to(joined.device)]
            key, value = joined.split(widths, -1)
        segments = packed_segments(lengths, size, rank)
        channels = value.shape[-1]
        query, key, value = _of_one_width(query, key, value)
        out = attend_packed(
            query, key, value, segments, self.scale, self.window, self.softmax_offset
        )
        return out[..., :channels].reshape(out.shape[0], -1)
