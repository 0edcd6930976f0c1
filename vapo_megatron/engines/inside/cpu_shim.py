"""Everything that SGLang 0.5.23 lacks on a machine without a GPU, in one file.

SGLang's scheduler, radix cache, sampler, log-probs, weight updates and HTTP server run on CPU as
they are; its kernels have torch forms. Missing are a few names and operators of compiled packages
that are published only for GPUs or AVX-512, and speed: SGLang's torch attention loops over the
requests of a batch in Python.

install() is called in every process of a server before SGLang is used. With a CUDA device it does
nothing; the torch build does not count, as the registry's CUDA build of torch also runs on CPU
machines. Each part is applied only if the real one is missing.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from vapo_megatron.engines.inside import cpu_delta_net, cpu_prefixes
from vapo_megatron.engines.inside.cpu_sinks import install_sinks

# Imported from sgl_kernel on the CPU path of modules that every server imports; only speculative
# decoding and hierarchical caches call them.
_UNUSED_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
# Above this many (query, key) pairs of a padded prefill the mask takes too much memory: use
# SGLang's loop instead.
_MAX_PADDED_PAIRS = 1 << 24

_libraries: list[torch.library.Library] = []  # operators live as long as these objects
_installed = False


def install() -> bool:
    """Make SGLang run on a CPU machine. Returns whether this is one."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        if importlib.util.find_spec("torchvision") is None:
            _install_torchvision_names()
        if importlib.util.find_spec("sgl_kernel") is None:
            _install_kernel_names()
        _patch_sglang()
        _installed = True
    return True


def _install_torchvision_names() -> None:
    """Names that sglang.srt imports for vision models and that text models never call.

    torchvision is not in the CPU environment: its wheels in the registry are built for a CUDA build
    of torch, and one that fails to load breaks transformers' text models too.
    """
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # cached: transformers does without it from here
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    whole, transforms, functional = modules = [types.ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    whole.__dict__["transforms"] = transforms
    for module in (transforms, functional):
        module.__dict__["InterpolationMode"] = types.SimpleNamespace()
    transforms.__dict__["functional"] = functional


def _install_kernel_names() -> None:
    """A module `sgl_kernel` whose kernels raise when called, and the operators that a server
    calls."""
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.__dict__["__version__"] = "0+cpu.stub"
    for name in _UNUSED_KERNELS:
        setattr(module, name, _refuse(name))
    sys.modules["sgl_kernel"] = module
    sys.modules["sgl_kernel.mamba"] = cpu_delta_net.module()
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    cpu_delta_net.define(library)
    _libraries.append(library)


def _refuse(name: str) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> None:
        raise RuntimeError(
            f"sgl_kernel.{name} has no CPU form here: the feature that calls it needs a GPU"
        )

    return kernel


def _patch_sglang() -> None:
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from sglang.srt.arg_groups import choices, overrides
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common as host_pool

    # The default allocator registers host memory with CUDA.
    host_pool.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_host
    # Seeded sampling comes with deterministic inference, which allows only some attention backends
    # and swaps in batch-invariant Triton kernels. The torch attention below gives each request its
    # own rows, so it is invariant up to rounding; there is no Triton on CPUs.
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
    register_resolution_hook("handle_deterministic_inference")(_allowing_torch)
    batch_invariant_ops.enable_batch_invariant_mode = _do_nothing
    # States of delta nets are kept for prefixes without the buffer that only GPUs have.
    overrides.supports_mamba_cache_extra_buffer = _refuse_buffer
    backend = TorchNativeAttnBackend
    # Requests that pad the batches of ranks with fewer requests (attn_dp_size); as in the AMX
    # backend.
    backend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    backend.init_forward_metadata = _forgetting_slots(backend.init_forward_metadata)
    backend._run_sdpa_forward_decode = _batched_decode(backend._run_sdpa_forward_decode)
    backend._run_sdpa_forward_extend = _batched_extend(backend._run_sdpa_forward_extend)
    install_sinks(backend)
    cpu_prefixes.install_waiting()


def _allowing_torch(server_args: Any, check: Callable[[Any], None]) -> None:
    """Around SGLang's check of deterministic inference, which on unknown backends refuses latent
    attention and disables the prefix cache. With the torch attention a response is the same up to
    rounding whether its prompt was cached or not: the cache is used where prompts are to be
    shared."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.overrides import declare_resolution

    allowed = choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    allowed.append("torch_native")
    try:
        check(server_args)
    finally:
        allowed.remove("torch_native")
    if server_args.enable_deterministic_inference and server_args.schedule_policy != "lpm":
        declare_resolution(server_args, "_handle_deterministic_inference", disable_radix_cache=True)


def _allocate_host(dims: Any, dtype: torch.dtype, device: str = "cpu", **_: object) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def _do_nothing(*args: object, **kwargs: object) -> None:
    return None


def _refuse_buffer(*args: object) -> bool:
    return False


# --- seeded sampling
# -------------------------------------------------------------------------------------------------


def _mix(state: NDArray[np.uint32], block: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotate_left(state ^ block, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _scrambled(block: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _rotate_left(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _rotate_left(x: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def murmur_hash32_blocks(blocks: list[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """MurmurHash3_x86_32 with seed 0 of messages given as 32-bit little-endian blocks (A. Appleby,
    public domain).

    blocks broadcast against each other. numpy's uint32 wraps around as the hash needs; torch cannot
    compute with uint32, and int64 takes eight times as long.
    """
    state = np.zeros_like(blocks[0])
    for block in blocks:
        state = _mix(state, _scrambled(block))
    state ^= np.uint32(4 * len(blocks))
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return state


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Hash of (seed [n] 64 bits, position [n], column [m]) -> uint32 [n, m].

    As in sglang/kernels/ops/sampling/murmur_hash.py: the noise of the Gumbel-max sampler depends on
    a request's own seed and position and on nothing in its batch.
    """
    words = seed.numpy().view(np.uint64)
    rows = [words, words >> np.uint64(32), positions.numpy()]
    blocks = [
        *(row.astype(np.uint32)[:, None] for row in rows),
        col_indices.numpy().astype(np.uint32)[None, :],
    ]
    return torch.from_numpy(murmur_hash32_blocks(blocks))


# --- attention over all requests of a batch at once
# ------------------------------------------------------------------


def padded_slots(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots [B, longest] of every request, and which are real (bool, same shape); the others
    are slot 0.

    req_to_token [pool, longest context] holds the slots; req_pool_indices, seq_lens [B].
    """
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices.long(), :longest].long()
    real = torch.arange(longest, device=slots.device)[None, :] < seq_lens[:, None]
    return slots.masked_fill(~real, 0), real


def _cached(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a cache [slots, kv_heads, d] at slots [B, longest]: [B, kv_heads, longest, d].

    index_select copies whole rows; cache[slots], which takes six times as long, looks up every
    number."""
    return (
        cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
    )


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    real: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """One new token of every request against that request's cache.

    query [B, heads, d]; k_cache, v_cache [slots, kv_heads, d]; slots, real: of padded_slots, the
    new token included. Returns [B, heads, d_v].
    """
    keys, values = (_cached(cache, slots).to(query.dtype) for cache in (k_cache, v_cache))
    batch, heads, dim = query.shape
    # Query heads that share a key head are rows of one attention, so keys are not copied per query
    # head.
    rows = query.view(batch, keys.shape[1], heads // keys.shape[1], dim)
    attended = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=real[:, None, None, :], scale=scaling
    )
    return attended.reshape(batch, heads, -1)


def extend_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of the new tokens of every request (prefill), prefixes from the cache.

    query [T, heads, d], the requests' new tokens one after another, extend_seq_lens [B] of each;
    seq_lens [B] = extend_prefix_lens + extend_seq_lens; the rest as in decode_attention. Returns
    [T, heads, d_v].
    """
    slots, real = padded_slots(req_to_token, req_pool_indices, seq_lens)
    keys, values = (_cached(cache, slots).to(query.dtype) for cache in (k_cache, v_cache))
    batch, kv_heads, longest, _ = keys.shape
    group = query.shape[1] // kv_heads

    new = torch.arange(int(extend_seq_lens.max()), device=query.device)
    is_new = new[None, :] < extend_seq_lens[:, None]  # [B, most new]
    padded = query.new_zeros(batch, len(new), *query.shape[1:])
    padded[is_new] = query
    # [B, most new, heads, d] -> [B, kv_heads, group * most new, d]: rows as in decode_attention
    rows = padded.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    positions = extend_prefix_lens[:, None] + new[None, :]
    visible = torch.arange(longest, device=query.device)[None, None, :] <= positions[:, :, None]
    mask = (visible & real[:, None, :])[:, None].expand(-1, group, -1, -1).flatten(1, 2)[:, None]
    attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return attended.unflatten(2, (group, len(new))).permute(0, 3, 1, 2, 4).flatten(2, 3)[is_new]


def _forgetting_slots(init_forward_metadata: Callable[..., None]) -> Callable[..., None]:
    """Forgets the slots of the last forward pass; within a pass they are the same in all layers."""

    def run(self: Any, forward_batch: object) -> None:
        self.slots = None
        init_forward_metadata(self, forward_batch)

    return run


def _batched_decode(per_request: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention in one batch; SGLang's per-request method only for encoders and sliding windows."""

    def run(
        self: Any, query: torch.Tensor, output: torch.Tensor, *cache: Any, **options: Any
    ) -> torch.Tensor:
        k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = cache
        if encoder_lens is not None or options["sliding_window_size"] is not None:
            return per_request(self, query, output, *cache, **options)
        if self.slots is None:
            self.slots = padded_slots(req_to_token, req_pool_indices, seq_lens)
        slots, real = self.slots
        return output.copy_(
            decode_attention(query, k_cache, v_cache, slots, real, options["scaling"])
        )

    return run


def _batched_extend(per_request: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention in one batch; SGLang's per-request method for encoders, sliding windows, and
    prompts too long or uneven to be padded."""

    def run(
        self: object, query: torch.Tensor, output: torch.Tensor, *cache: Any, **options: Any
    ) -> torch.Tensor:
        (
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            prefix_lens,
            new_lens,
            encoder_lens,
        ) = cache
        padded_pairs = len(seq_lens) * int(seq_lens.max()) * int(new_lens.max())
        plain = (
            options["causal"] and encoder_lens is None and options["sliding_window_size"] is None
        )
        if plain and padded_pairs <= _MAX_PADDED_PAIRS:
            lens = seq_lens, prefix_lens, new_lens
            attended = extend_attention(
                query, k_cache, v_cache, req_to_token, req_pool_indices, *lens, options["scaling"]
            )
            return output.copy_(attended)
        return per_request(self, query, output, *cache, **options)

    return run


# --- models over several ranks
# ---------------------------------------------------------------------------------------


def share_experts() -> None:
    """In a scheduler: experts on several ranks, which SGLang supports only on GPUs."""
    from sglang.srt.layers.moe import fused_moe_native

    fused_moe_native.moe_forward_native = _with_own_experts(fused_moe_native.moe_forward_native)


def _with_own_experts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Experts of other ranks, given as -1, become this rank's first expert with weight 0.

    Each token's choices are computed one by one, as SGLang counts an expert once a token.
    """

    def run(layer: Any, x: torch.Tensor, chosen: Any, *args: Any) -> Any:
        elsewhere = chosen.topk_ids < 0
        if not elsewhere.any():
            return forward(layer, x, chosen, *args)
        ids = chosen.topk_ids.masked_fill(elsewhere, 0)
        weights = chosen.topk_weights.masked_fill(elsewhere, 0)
        alone = zip(ids.split(1, 1), weights.split(1, 1), strict=True)
        return sum(
            forward(layer, x, chosen._replace(topk_ids=i, topk_weights=w), *args) for i, w in alone
        )

    return run
