"""The modules of a transformer layer, with core attention and norm for machines without Transformer Engine.

Megatron's own DotProductAttention does not support context parallelism and packed sequences, and its WrappedTorchNorm
does not support sequence parallelism; the ones here replace them in its layer spec.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vapo_megatron.data.microbatch import local_positions, natural_order
from vapo_megatron.megatron.platform import Platform


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (real, imaginary), (out_real, out_imaginary) = x.chunk(2, -1), result.chunk(2, -1)
    torch.mul(real, cos, out=out_real).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=out_imaginary).addcmul_(real, sin, value=sign)
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [t, heads, d], whose halves are real and imaginary parts, by angles given as cos and sin [t, 1, d / 2]."""
    turned: Tensor = _Rotate.apply(x, cos, sin)
    return turned


class RotaryTables:
    """Cosines and sines of a context-parallel rank's positions, shared by the layers of a model."""

    def __init__(self, inv_freq: Tensor, cp_size: int, cp_rank: int) -> None:
        """inv_freq: float32 [d / 2], angle between neighbouring positions."""
        self._inv_freq, self._cp = inv_freq, (cp_size, cp_rank)
        self._key: weakref.ref[Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, cu_seqlens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [t, 1, d / 2] in dtype, on the device of cu_seqlens [sequences + 1]. They are cached for as long as
        cu_seqlens is the same tensor, which must not be changed."""
        last = self._key() if self._key is not None else None
        if last is not cu_seqlens or self._tables is None or self._tables[0].dtype != dtype:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            positions = torch.cat([torch.arange(n) for n in lengths])[local_positions(lengths, *self._cp)]
            angles = torch.outer(positions.float(), self._inv_freq)[:, None]
            device = cu_seqlens.device
            self._tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
            self._key = weakref.ref(cu_seqlens)
        return self._tables


# Mean tokens of packed sequences from which each is attended to on its own rather than in a padded batch.
_LONG = 64


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm; Megatron sums its weight gradient over tensor-parallel ranks under sequence
    parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


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
    """A run of queries of one sequence and the keys they attend to: the last query sees the last key."""

    q_start: int
    q_length: int
    k_start: int
    k_length: int


def packed_segments(lengths: list[int], cp: int, rank: int) -> list[Segment]:
    """Causal segments of the packed sequences `lengths` (tokens, padding included) that a CP rank computes: with cp > 1
    each sequence is cut in 2 * cp chunks, of which it holds `rank` and `2 * cp - 1 - rank`. Keys are in natural packed
    order, queries in the rank's own."""
    segments, q, k = [], 0, 0
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


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of sequences of one length: q [b, t, heads, d], k and v [b, t, kv_heads, d] -> like q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of several segments as one padded batch, of q [t, heads, d] and k, v [t', kv_heads, d]: rows [sum
    q_length, heads, d] and where they belong in q. Padding is on the right: a causal mask hides it from every real
    row."""
    device = q.device
    q_index = torch.arange(max(s.q_length for s in segments), device=device)
    k_index = torch.arange(max(s.k_length for s in segments), device=device)
    q_start, q_length, k_start, k_length = torch.tensor(segments, device=device).T[..., None]
    q_at = (q_start + q_index).clamp_max(q.shape[0] - 1)
    k_at = (k_start + k_index).clamp_max(k.shape[0] - 1)
    square = all(s.q_length == s.k_length for s in segments)
    mask = None if square else (k_index <= (q_index + (k_length - q_length))[..., None])[:, None]
    out = F.scaled_dot_product_attention(
        q[q_at].transpose(1, 2),
        k[k_at].transpose(1, 2),
        v[k_at].transpose(1, 2),
        attn_mask=mask,
        is_causal=square,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    real = q_index < q_length
    return out.transpose(1, 2)[real], q_at[real]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], scale: float) -> Tensor:
    """Causal attention over packed sequences: q [t, heads, d]; k, v [t', kv_heads, d], keys and values in natural
    packed order -> [t, heads, d]. segments: from packed_segments; together they cover q. scale: of the scores."""
    if all((s.q_start, s.q_length) == (s.k_start, s.k_length) for s in segments):
        lengths = [s.q_length for s in segments]
        if len(set(lengths)) == 1:
            rows = (-1, lengths[0])
            return _attend_rows(q.unflatten(0, rows), k.unflatten(0, rows), v.unflatten(0, rows), scale).flatten(0, 1)
        if len(q) >= _LONG * len(segments):
            # Cutting and joining are cheap, in backward too; indices that pick rows out of a pack are not.
            whole = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat([_attend_rows(a[None], b[None], c[None], scale)[0] for a, b, c in whole])
    outputs, places = zip(
        *(_attend_batch(q, k, v, [segments[i] for i in batch], scale) for batch in _batches(segments)), strict=True
    )
    return torch.cat(outputs)[torch.cat(places).argsort()]


class SDPACoreAttention(MegatronModule):
    """Megatron's core attention on torch's scaled_dot_product_attention: packed (thd), causal, context-parallel. With
    rotary tables it first rotates queries and keys."""

    rotary: RotaryTables | None = None

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
        self.scale = softmax_scale or config.kv_channels**-0.5

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
        """query [t, heads, d], key and value [t, kv_heads, d] of this CP rank -> [t, heads * d]."""
        size, rank = self.cp.size(), self.cp.rank()
        cu = packed_seq_params.cu_seqlens_q_padded
        if cu is None:
            cu = packed_seq_params.cu_seqlens_q
        lengths = (cu[1:] - cu[:-1]).tolist()
        if self.rotary is not None:
            cos, sin = self.rotary.of(cu, query.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if size > 1:
            stacked = _GatherSequence.apply(torch.stack((key, value), dim=1), self.cp)
            stacked = stacked[natural_order(lengths, size).to(stacked.device)]
            key, value = stacked.unbind(1)
        out = attend_packed(query, key, value, packed_segments(lengths, size, rank), self.scale)
        return out.reshape(out.shape[0], -1)


def uses_transformer_engine(attention: str, platform: Platform) -> bool:
    """Whether layers are Transformer Engine's; attention: ModelConfig.attention."""
    return attention != "sdpa" and platform.has_transformer_engine


def layer_spec(
    qk_norm: bool, transformer_engine: bool, num_experts: int = 0, adapters: bool = False
) -> tuple[Any, Any]:
    """Megatron's own layer spec, and the class of the final norm. num_experts: experts of a layer, 0 for a dense model.
    adapters: whether linear layers may have adapters, whose input is the norm's output: norms are then not fused into
    them. Without Transformer Engine this is the local spec with norms and core attention replaced."""
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        experts = {"num_experts": num_experts, "moe_grouped_gemm": True} if num_experts else {}
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm, **experts)
        if adapters:
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TENorm
            spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            if not num_experts:
                mlp = spec.submodules.mlp  # from Megatron-Core 0.17 on a partial function
                getattr(mlp, "keywords", vars(mlp))["submodules"].linear_fc1 = TEColumnParallelLinear
        return spec, TENorm
    spec = get_gpt_layer_local_spec(num_experts=num_experts or None, qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if num_experts:
        # As under Transformer Engine, which has nothing to fuse this norm with: saved keys are those of either layers.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec, RMSNorm


def freeze_attention(model: torch.nn.Module) -> None:
    """Freeze the attention modules, but not the norms that Transformer Engine's linear layers hold."""
    for name, parameter in model.named_parameters():
        if ".self_attention." in name and not name.endswith(".layer_norm_weight"):
            parameter.requires_grad_(False)
