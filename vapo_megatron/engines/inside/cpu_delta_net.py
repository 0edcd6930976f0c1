"""SGLang 0.5.23's kernels of gated delta nets and gated attention, in plain torch for CPUs.

SGLang has them as Triton kernels for GPUs, and for CPUs as compiled operators of a package with
AVX-512 builds alone. They are called with what SGLang's layers/attention/linear/gdn_backend.py,
models/qwen3_next.py and models/qwen3_5.py pass. Requests of a batch do not see each other: each has
its own rows and its own slot of the state pools, and slot -1 is padding.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_EPSILON = 1e-6


def _activated(x: Tensor, activation: str | None) -> Tensor:
    if activation in ("silu", "swish"):
        return F.silu(x)
    if activation is None:
        return x
    raise ValueError(f"activation {activation!r} of a convolution has no CPU form here")


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Prefill: x [channels, tokens] of all requests, weight [channels, kernel] -> [channels,
    tokens].
    conv_states [slots, channels, kernel - 1] get the last inputs of each request, and have
    the inputs of its earlier pieces where has_initial_state [requests] says so. Requests are the
    spans of query_start_loc, slots are cache_indices."""
    assert conv_states is not None
    assert cache_indices is not None
    assert query_start_loc is not None
    assert has_initial_state is not None
    kept = weight.shape[1] - 1
    bounds = query_start_loc.tolist()
    result = torch.zeros_like(x)
    spans = zip(
        bounds, bounds[1:], cache_indices.tolist(), has_initial_state.tolist(), strict=False
    )
    for start, end, slot, continues in spans:
        if slot < 0 or start == end:
            continue
        before = conv_states[slot].to(x.dtype) if continues else x.new_zeros(len(x), kept)
        inputs = torch.cat((before, x[:, start:end]), 1)
        mixed = F.conv1d(inputs[None], weight[:, None].to(x.dtype), bias, groups=len(x))[0]
        result[:, start:end] = _activated(mixed, activation)
        conv_states[slot] = inputs[:, -kept:].to(conv_states.dtype)
    return result


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Decoding: x [requests, channels], one token of each; otherwise as causal_conv1d_fn_cpu."""
    assert conv_state_indices is not None
    real = conv_state_indices >= 0
    slots = conv_state_indices[real].long()
    inputs = torch.cat((conv_state[slots].to(x.dtype), x[real][..., None]), -1)
    mixed = (inputs * weight.to(x.dtype)).sum(-1)
    if bias is not None:
        mixed = mixed + bias
    conv_state[slots] = inputs[..., 1:].to(conv_state.dtype)
    result = torch.zeros_like(x)
    result[real] = _activated(mixed, activation)
    return result


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def _recur(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A token of each row: state [rows, heads, values, keys], q and k [rows, heads, keys], v [rows,
    heads, values], decay and beta [rows, heads] -> the next state, and its output for q."""
    state = state * decay.exp()[..., None, None]
    corrected = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + corrected[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def _prepared(q: Tensor, k: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [tokens, value heads, keys] in float32, of length 1, queries scaled."""
    served = value_heads // q.shape[-2]
    scale = q.shape[-1] ** -0.5
    q, k = (_unit(x.float()).repeat_interleave(served, -2) for x in (q, k))
    return q * scale, k


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Prefill: q, k [1, tokens, key heads, keys], v [1, tokens, value heads, values], g and beta
    [1, tokens, value heads] -> [1, tokens, value heads, values]. initial_state [slots, value heads,
    values, keys] is read and written at initial_state_indices."""
    assert not head_first and use_qk_l2norm_in_kernel
    queries, keys = _prepared(q[0], k[0], v.shape[2])
    values = v[0].float()
    result = torch.zeros_like(v[0])
    bounds = cu_seqlens.tolist()
    spans = zip(bounds, bounds[1:], initial_state_indices.tolist(), strict=False)
    for start, end, slot in spans:
        if slot < 0 or start == end:
            continue
        state = initial_state[slot][None].float()
        for token in range(start, end):
            row = slice(token, token + 1)
            inputs = (x[row] for x in (queries, keys, values, g[0].float(), beta[0].float()))
            state, out = _recur(state, *inputs)
            result[row] = out.to(result.dtype)
        initial_state[slot] = state[0].to(initial_state.dtype)
    return result[None], None, None


def _gates(
    a_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    slope: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Decays and steps [tokens, value heads], float32."""
    rate = a_log.float().exp()
    decay = -rate * F.softplus(a.float() + dt_bias.float(), slope, threshold)
    return decay, b.float().sigmoid()


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """a, b [tokens, value heads] -> decays and steps [1, tokens, value heads]."""
    decay, beta = _gates(A_log, a, b, dt_bias)
    # The steps take the rounding of b's dtype, as in the Triton kernel.
    return decay[None], beta.to(b.dtype).float()[None]


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Decoding: one token of each request, otherwise as chunk_gated_delta_rule_cpu."""
    assert use_qk_l2norm_in_kernel
    queries, keys = _prepared(q[0], k[0], v.shape[2])
    decay, beta = _gates(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    real = initial_state_indices >= 0
    slots = initial_state_indices[real].long()
    inputs = (x[real] for x in (queries, keys, v[0].float(), decay, beta))
    state, out = _recur(initial_state_source[slots].float(), *inputs)
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    result = torch.zeros_like(v[0])
    result[real] = out.to(v.dtype)
    return result[None]


def fused_rmsnorm_gated(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """A norm of each head, times silu of its gate."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (normed * F.silu(z.float())).to(x.dtype)


def fused_sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """In place: x times sigmoid of its gate."""
    x.copy_((x.float() * gate.float().sigmoid().reshape(x.shape)).to(x.dtype))


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """In place: add what all tokens' expert gives, [tokens, hidden], times sigmoid of its gate."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    total = final_hidden_states.float() + gate * shared_output.float()
    final_hidden_states.copy_(total.to(final_hidden_states.dtype))


def _zero_centred_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    heads = x.reshape(-1, head_dim)
    return F.rms_norm(heads.float(), (head_dim,), 1.0 + weight.float(), eps).to(x.dtype)


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Zero-centred norms of the heads of queries and keys, [tokens * heads, head_dim]."""
    return (
        _zero_centred_norm(q, q_weight, eps, head_dim),
        _zero_centred_norm(k, k_weight, eps, head_dim),
    )


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of queries that alternate with their gates, which are returned beside them."""
    q, gate = q_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(-2)
    queries, keys = fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim)
    return queries, keys, gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values in one; output gates by head; steps; decays."""
    mixed = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split((mixed, num_heads_v * head_v), -1)
    b, a = mixed_ba.chunk(2, -1)
    z = z.unflatten(-1, (num_heads_v, head_v))
    return mixed_qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


_GATED = "Tensor q_weight, Tensor k_weight, float eps, int head_dim"
_OPERATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "fused_gdn_gating_cpu": (
        fused_gdn_gating,
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        fused_sigmoid_gating_delta_rule_update,
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) "
        "-> Tensor",
    ),
    "fused_rmsnorm_gated_cpu": (
        fused_rmsnorm_gated,
        "(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor",
    ),
    "fused_sigmoid_mul_cpu": (fused_sigmoid_mul, "(Tensor(a!) x, Tensor gate) -> ()"),
    "fused_qk_gemma_rmsnorm_cpu": (
        fused_qk_gemma_rmsnorm,
        f"(Tensor q, Tensor k, {_GATED}) -> (Tensor, Tensor)",
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        fused_qk_gemma_rmsnorm_with_gate,
        f"(Tensor q_gate, Tensor k, {_GATED}, int num_heads) -> (Tensor, Tensor, Tensor)",
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        fused_qkvzba_split_reshape_cat_contiguous,
        "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, "
        "int head_v) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
}


def module() -> types.ModuleType:
    """What SGLang imports as sgl_kernel.mamba."""
    made = types.ModuleType("sgl_kernel.mamba")
    for kernel in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(made, kernel.__name__, kernel)
    return made


def define(library: torch.library.Library) -> None:
    """Define the operators in sgl_kernel's library."""
    for name, (kernel, signature) in _OPERATORS.items():
        library.define(name + signature)
        library.impl(name, kernel, "CPU")
