"""Core attention for machines without Transformer Engine: packed sequences, context parallelism, a
window, rotary table and scale of each layer's own.

Megatron's own DotProductAttention does not support context parallelism and packed sequences; this
one replaces it in its layer spec.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vapo_megatron.data.microbatch import natural_order
from vapo_megatron.megatron.packed_attention import (
    attend_packed,
    packed_segments,
    prefixes_of,
    segments_after,
    with_prefixes,
)
from vapo_megatron.megatron.rotary import RotaryTables
from vapo_megatron.megatron.sharded_parameters import cut_by_heads
from vapo_megatron.models.layers import SelfAttention


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
    turned_factor = 1.0
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
        self.turned_factor = attention.turned_factor
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
        own = self.state_dict(prefix="", keep_vars=True)
        return cut_by_heads(own, prefix, sharded_offsets, metadata, self.tp_group)

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
        prefixes = prefixes_of(packed_seq_params)
        if self.rotary is not None:
            query, key = self.rotary.turn(query, key, cu, self.turned_factor, prefixes)
        if size > 1:
            widths = (key.shape[-1], value.shape[-1])
            joined = _GatherSequence.apply(torch.cat((key, value), dim=-1), self.cp)
            joined = joined[natural_order(lengths, size).to(joined.device)]
            key, value = joined.split(widths, -1)
        if prefixes is None:
            segments = packed_segments(lengths, size, rank)
        else:
            key = with_prefixes(key, lengths, prefixes)
            value = with_prefixes(value, lengths, prefixes)
            segments = segments_after(lengths, prefixes)
        channels = value.shape[-1]
        query, key, value = _of_one_width(query, key, value)
        out = attend_packed(
            query, key, value, segments, self.scale, self.window, self.softmax_offset
        )
        return out[..., :channels].reshape(out.shape[0], -1)
