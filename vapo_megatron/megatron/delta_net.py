"""Gated delta nets (arXiv 2412.06464) of packed sequences as Megatron layers.

Each value head has a state S [key_dim, value_dim], which starts at 0 in every sequence. At a token

    S = exp(g) S + beta k (v - exp(g) S^T k)^T        out = S^T q

with a decay g <= 0 and a step 0 < beta < 1 of the token's own (section 3.1). Tensor-parallel ranks
share out the key heads, each with its value heads. Context-parallel ranks exchange tokens for heads
and back, since a state needs all tokens before it.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from vapo_megatron.data.microbatch import natural_order
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.sharded_parameters import cut_by_heads
from vapo_megatron.models.layers import DeltaNet

# Tokens whose corrections are solved for together.
CHUNK = 64
_EPSILON = 1e-6


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Each channel of a token and of those before it in its sequence, weighted and summed.

    Args:
        x: [t, channels] of packed sequences.
        weight: [channels, kernel]; the last is the token's own.
        positions: [t], of tokens in their sequences: an earlier sequence is not seen.

    Returns:
        [t, channels], float32.
    """
    x = x.float()
    weight = weight.float()
    total = x * weight[:, -1]
    for distance in range(1, weight.shape[1]):
        earlier = F.pad(x, (0, 0, distance, 0))[: len(x)]
        is_inside = (positions >= distance)[:, None]
        total = total + torch.where(is_inside, earlier * weight[:, -1 - distance], 0.0)
    return total


def _scan_order(lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Where the tokens of packed sequences are in their chunks, which are in the order of the scan:
    the first chunk of every sequence, the longest first, then the second of those that have one,
    and so on.

    Returns:
        places [t] among the chunks' tokens, and the number of sequences at each step of the scan.
    """
    chunks = [-(-length // CHUNK) for length in lengths]
    longest_first = sorted(range(len(lengths)), key=lambda index: -chunks[index])
    rows = {sequence: row for row, sequence in enumerate(longest_first)}
    active = [sum(count > step for count in chunks) for step in range(max(chunks))]
    starts = torch.tensor([0, *active]).cumsum(0)
    places = []
    for sequence, length in enumerate(lengths):
        position = torch.arange(length)
        chunk = starts[position // CHUNK] + rows[sequence]
        places.append(chunk * CHUNK + position % CHUNK)
    return torch.cat(places), active


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int]
) -> Tensor:
    """The recurrence of the module's docstring over packed sequences, chunk by chunk (section 3.3).

    Args:
        q, k: [t, heads, key_dim], float32.
        v: [t, heads, value_dim], float32.
        decay, beta: [t, heads], float32: g and beta.
        lengths: tokens of each sequence, together t.

    Returns:
        [t, heads, value_dim].
    """
    places, active = _scan_order(lengths)
    places = places.to(q.device)

    def chunked(x: Tensor) -> Tensor:
        """[t, heads, ...] -> [chunks, heads, CHUNK, ...], zeros where a sequence has ended."""
        padded = x.new_zeros(sum(active) * CHUNK, *x.shape[1:]).index_copy(0, places, x)
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k, v, decay, beta = (chunked(x) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    since_start = total.exp()[..., None]
    until_end = (total[..., -1:] - total).exp()[..., None]
    step = beta[..., None]
    # A token is corrected by what earlier ones of its chunk have written: a triangular system.
    system = (step * k) @ k.mT * between
    wanted = torch.cat((step * v, step * since_start * k), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = q @ k.mT * between
    outputs = []
    state = q.new_zeros(active[0], q.shape[1], k.shape[-1], v.shape[-1])
    start = 0
    for count in active:
        now = slice(start, start + count)
        state = state[:count]
        new = written[now] - of_state[now] @ state
        outputs.append(since_start[now] * (q[now] @ state) + scores[now] @ new)
        kept = since_start[now][..., -1:, :] * state
        state = kept + (until_end[now] * k[now]).mT @ new
        start += count
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[places]


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention's kernels, which need a GPU, compute the rule here."""
    return current_platform().is_cuda and importlib.util.find_spec("fla") is not None


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """As gated_delta_rule, by flash-linear-attention (written after fla-core 0.6.0, never run)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        q[None],
        k[None],
        v[None],
        g=decay[None],
        beta=beta[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens.long(),
    )
    result: Tensor = out[0]
    return result


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """The rule with queries and keys of length 1, and queries scaled by 1 / sqrt(key_dim).

    Args:
        q, k: [t, key heads, key_dim]; each serves as many value heads one after another.
        v: [t, value heads, value_dim].
        decay, beta: [t, value heads], float32.
        cu_seqlens, lengths: starts of the sequences and their end, [sequences + 1]; their tokens.

    Returns:
        [t, value heads, value_dim] in v's dtype.
    """
    served = v.shape[1] // q.shape[1]
    # Whoever computes in float32 wants digits that Triton's products in TF32 do not have.
    if has_kernels() and v.dtype != torch.float32:
        q = q.repeat_interleave(served, 1)
        k = k.repeat_interleave(served, 1)
        return _by_kernels(q, k, v, decay, beta, cu_seqlens)
    q = _unit(q.float()).repeat_interleave(served, 1) * q.shape[-1] ** -0.5
    k = _unit(k.float()).repeat_interleave(served, 1)
    return delta_rule(q, k, v.float(), decay, beta, lengths).to(v.dtype)


class GatedDeltaNet(MegatronModule):
    """A gated delta net in the place of a layer's self-attention.

    Parameters are arranged by key heads (models/rules.py: HeadGroups): for each its query, key,
    values and their output gates in linear_qkv; decays and steps of its value heads in
    gates_weight, which every tensor-parallel rank has whole. norm_weight is not zero-centred,
    whatever the norms of the model are.
    """

    def __init__(
        self, config: Any, layer_number: int, net: DeltaNet, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.net = net
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.key_heads = net.key_heads // self.tp_group.size()
        self.served = net.value_heads // net.key_heads
        dtype = config.params_dtype
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            net.mixed_size + net.value_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )
        self.linear_proj = RowParallelLinear(
            net.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )
        value_heads = self.key_heads * self.served
        channels = net.mixed_size // self.tp_group.size()
        self.conv_weight = Parameter(torch.zeros(channels, 1, net.kernel, dtype=dtype))
        self.A_log = Parameter(torch.zeros(value_heads, dtype=dtype))
        self.dt_bias = Parameter(torch.zeros(value_heads, dtype=dtype))
        for parameter in (self.conv_weight, self.A_log, self.dt_bias):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        gates = torch.zeros(2 * net.value_heads, config.hidden_size, dtype=dtype)
        self.gates_weight = Parameter(gates)
        # A rank sees the gradient of its tokens alone; Megatron sums the gradients of marked
        # parameters.
        self.gates_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.norm_weight = Parameter(torch.ones(net.value_dim, dtype=dtype))

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [t, 1, hidden] of this rank's tokens -> the same shape."""
        net = self.net
        values = self.served * net.value_dim
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        projected, _ = self.linear_qkv(hidden_states)
        by_head = projected.squeeze(1).unflatten(-1, (self.key_heads, -1))
        mixed, gate = by_head.split((2 * net.key_dim + values, values), -1)
        heads = torch.cat((mixed, self._gates(hidden_states)), -1)
        # What is computed of the projections is computed again in the backward pass.
        out = checkpoint(
            self._mix, heads, cu_seqlens, use_reentrant=False, preserve_rng_state=False
        )
        each = (self.served, net.value_dim)
        gated = self._gated_norm(out.unflatten(-1, each), gate.unflatten(-1, each))
        result: tuple[Tensor, None] = self.linear_proj(gated.flatten(1)[:, None])
        return result

    def _gates(self, hidden_states: Tensor) -> Tensor:
        """Inputs of steps and decays, [t, key heads of this rank, 2 * value heads of each]."""
        gates = F.linear(hidden_states, self.gates_weight).squeeze(1)
        if self.config.sequence_parallel:
            gates = gather_from_sequence_parallel_region(gates, group=self.tp_group)
        else:
            gates = copy_to_tensor_model_parallel_region(gates, group=self.tp_group)
        mine = gates.chunk(self.tp_group.size(), -1)[self.tp_group.rank()]
        return mine.unflatten(-1, (self.key_heads, -1))

    def _mix(self, heads: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The convolution and the rule: heads [t, key heads, queries, keys, values, steps and
        decays of a head] of this rank's tokens -> [t, key heads, values of a head]."""
        net = self.net
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        heads, mine = self._to_whole_sequences(heads, lengths)
        channels = 2 * net.key_dim + self.served * net.value_dim
        mixed, step, decay = heads.split((channels, self.served, self.served), -1)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(heads.device)
        weight = self.conv_weight.view(self.key_heads, channels, net.kernel)[mine].flatten(0, 1)
        convolved = F.silu(causal_convolution(mixed.flatten(1), weight, positions)).to(heads.dtype)
        q, k, v = convolved.view_as(mixed).split(
            (net.key_dim, net.key_dim, self.served * net.value_dim), -1
        )
        rate = self.A_log.float().exp().view(self.key_heads, self.served)[mine]
        shift = self.dt_bias.float().view(self.key_heads, self.served)[mine]
        out = gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (self.served, -1)).flatten(1, 2),
            (-rate * F.softplus(decay.float() + shift)).flatten(1),
            step.float().sigmoid().flatten(1),
            cu_seqlens,
            lengths,
        )
        return self._to_own_tokens(out.view(len(out), -1, self.served * net.value_dim), lengths)

    def _to_whole_sequences(self, heads: Tensor, lengths: list[int]) -> tuple[Tensor, slice]:
        """[t, key heads, c] of a context-parallel rank's tokens -> all tokens in natural order of
        its share of the heads, [cp * t, key heads / cp, c], and which heads these are."""
        size = self.cp_group.size()
        if size == 1:
            return heads, slice(None)
        share = self.key_heads // size
        parts = heads.unflatten(1, (size, share)).transpose(0, 1)
        joined = all_to_all(self.cp_group, parts).flatten(0, 1)
        start = self.cp_group.rank() * share
        order = natural_order(lengths, size).to(joined.device)
        return joined[order], slice(start, start + share)

    def _to_own_tokens(self, out: Tensor, lengths: list[int]) -> Tensor:
        """The way back."""
        size = self.cp_group.size()
        if size == 1:
            return out
        order = natural_order(lengths, size).argsort().to(out.device)
        parts = all_to_all(self.cp_group, out[order].unflatten(0, (size, -1)))
        return parts.transpose(0, 1).flatten(1, 2)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """A norm of each value head, times silu of its gate: both [..., value_dim]."""
        # Each rank's heads give the weight a part of its gradient.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.config.layernorm_epsilon)
        return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For megatron.core.dist_checkpointing."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        cut = {"conv_weight": self.conv_weight, "A_log": self.A_log, "dt_bias": self.dt_bias}
        return state | cut_by_heads(cut, prefix, sharded_offsets, metadata, self.tp_group)
