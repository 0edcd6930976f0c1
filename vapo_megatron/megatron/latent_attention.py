"""Multi-head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on local layers: packed
sequences, tensor, sequence and context parallelism.

Megatron-Core 0.16.1's own module wants Transformer Engine's linear layers for the narrow
projections, has a rotary table that knows no context-parallel packed sequences without them, and
its norms have the model's epsilon. Parameters here have its names, so that saved keys match
Megatron's module under Transformer Engine (weights/mapping.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from typing_extensions import override

from vapo_megatron.megatron.attention import SDPACoreAttention
from vapo_megatron.megatron.packed_attention import prefixes_of
from vapo_megatron.megatron.rotary import RotaryTables, rotate
from vapo_megatron.models.layers import LatentAttention


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that is whole on every tensor-parallel rank, as Transformer Engine's
    down-projections are. Under sequence parallelism each rank's gradient covers its tokens only:
    Megatron sums the gradients of marked parameters."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., inputs] -> [..., outputs], and no bias, as Megatron's linear layers answer."""
        return F.linear(x, self.weight), None


class LatentSelfAttention(MegatronModule):
    """The attention of a layer, in the place of Megatron's SelfAttention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attention: LatentAttention,
        norm: type,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """attention: its numbers. norm: class of the norms of the narrow vectors."""
        super().__init__(config)
        self.layer_number = layer_number
        self.attention = attention
        self.tp_group = pg_collection.tp
        self.rotary: RotaryTables | None = None
        hidden = config.hidden_size
        rank = attention.query_rank
        if rank is None:
            self.linear_q_proj = self._wide(hidden, attention.query_size)
        else:
            self.linear_q_down_proj = DuplicatedLinear(hidden, rank, config)
            self.q_layernorm = norm(config, rank, attention.norm_eps)
            self.linear_q_up_proj = self._wide(rank, attention.query_size)
        kv_rank = attention.kv_rank
        expanded = attention.num_heads * (attention.plain_dim + attention.value_dim)
        self.linear_kv_down_proj = DuplicatedLinear(
            hidden, kv_rank + attention.rotary.channels, config
        )
        self.kv_layernorm = norm(config, kv_rank, attention.norm_eps)
        self.linear_kv_up_proj = self._wide(kv_rank, expanded)
        self.core_attention = SDPACoreAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=attention.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = RowParallelLinear(
            attention.value_size,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        self._recomputes_core = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def configure(self, rotary: RotaryTables | None) -> None:
        """Take the rotary tables, which the layers of a model share."""
        self.rotary = rotary

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [t, 1, hidden] of packed sequences, this rank's tokens under sequence
        parallelism -> the same shape, and no bias."""
        attention = self.attention
        widths = (attention.plain_dim, attention.rotary.channels)
        plain_query, turned_query = self._queries(hidden_states).split(widths, -1)
        narrow, _ = self.linear_kv_down_proj(hidden_states)
        latent, turned_key = narrow.split((attention.kv_rank, widths[1]), -1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        plain_key, value = (
            expanded[:, 0]
            .unflatten(-1, (-1, attention.plain_dim + attention.value_dim))
            .split((attention.plain_dim, attention.value_dim), -1)
        )
        cos, sin = self._tables(packed_seq_params, turned_query.dtype)
        interleaved = attention.rotary.interleaved
        turned_query = rotate(turned_query, cos, sin, interleaved)
        # One key for all heads, [t, 1, channels]: turned before it is repeated.
        turned_key = rotate(self._of_all_tokens(turned_key), cos, sin, interleaved)
        query = torch.cat((plain_query, turned_query), -1)
        key = torch.cat((plain_key, turned_key.expand(-1, plain_key.shape[1], -1)), -1)
        output, bias = self.linear_proj(
            self._attend(query, key, value, packed_seq_params).unsqueeze(1)
        )
        return output, bias

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """[t, heads of this rank, channels]."""
        if self.attention.query_rank is None:
            queries, _ = self.linear_q_proj(hidden_states)
        else:
            narrow, _ = self.linear_q_down_proj(hidden_states)
            queries, _ = self.linear_q_up_proj(self.q_layernorm(narrow))
        return queries[:, 0].unflatten(-1, (-1, self.attention.head_dim))

    def _of_all_tokens(self, key: Tensor) -> Tensor:
        """Channels that the heads of all ranks share, of all tokens: their gradient is a sum over
        ranks."""
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(key, group=self.tp_group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(key, group=self.tp_group)

    def _tables(self, packed: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this rank's tokens, [t, 1, channels / 2]."""
        assert self.rotary is not None, "configure() comes before forward()"
        cu = packed.cu_seqlens_q_padded
        if cu is None:
            cu = packed.cu_seqlens_q
        cos, sin = self.rotary.of(cu, dtype, prefixes_of(packed))
        factor = self.attention.turned_factor
        if factor == 1.0:
            return cos, sin
        return cos * factor, sin * factor

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Any) -> Tensor:
        """[t, width of the values of this rank's heads]."""

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output: Tensor = self.core_attention(query, key, value, packed_seq_params=packed)
            return output

        if self._recomputes_core and self.training:
            recomputed: Tensor = tensor_parallel.checkpoint(core, False, query, key, value)
            return recomputed
        return core(query, key, value)

    def _wide(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """A projection of which each tensor-parallel rank has its heads."""
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )
