"""The kernels that engines call load and compute: compiled ones, those that nvcc makes at first
use, Triton's, and FlashAttention-3. Needs a GPU. Where FlashAttention-3 alone fails, engines can do
with Triton's attention."""

import sys
import time

import sgl_kernel
import torch
from sglang.srt.layers.activation import silu_and_mul

_ERROR = 0.05


def main() -> int:
    """Prints figures, and `ok` at the end; returns the exit code."""
    print("sgl_kernel", sgl_kernel.__version__)
    _norms()
    _compiled_at_first_use()
    if not _flash_attention():
        print("FlashAttention-3 is not usable: run with --attention triton, or ATTENTION=triton")
        return 1
    print("ok")
    return 0


def _norms() -> None:
    x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    expected = torch.nn.functional.rms_norm(x.float(), (1024,), weight.float(), 1e-6)
    apart = (sgl_kernel.rmsnorm(x, weight, 1e-6).float() - expected).abs().max().item()
    print(f"rmsnorm: {apart:.4f}")
    assert apart < _ERROR, "rmsnorm is wrong"
    try:
        sgl_kernel.rmsnorm(x.float(), weight.float(), 1e-6)
        print("rmsnorm takes float32: engines/engine_limits.py need not refuse it any longer")
    except Exception as error:
        print(
            "rmsnorm in float32 is refused, as engines/engine_limits.py says:",
            str(error).splitlines()[0][:120],
        )


def _compiled_at_first_use() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        start = time.perf_counter()
        gate = torch.randn(8, 2048, device="cuda", dtype=dtype)
        found = silu_and_mul(gate)
        left, right = gate.float().chunk(2, -1)
        apart = (found.float() - torch.nn.functional.silu(left) * right).abs().max().item()
        print(f"silu_and_mul {dtype}: {apart:.4f}, compiled in {time.perf_counter() - start:.1f} s")
        assert apart < _ERROR, "silu_and_mul is wrong"


def _flash_attention() -> bool:
    """Whether one decoded token attends to 20 cached ones as PyTorch says, for both usual head
    sizes."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        for size in (64, 128):
            q = torch.randn(1, 8, size, device="cuda", dtype=torch.bfloat16)
            k, v = (
                torch.randn(32, 1, 2, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)
            )
            found = flash_attn_with_kvcache(
                q=q,
                k_cache=k,
                v_cache=v,
                page_table=torch.arange(32, device="cuda", dtype=torch.int32)[None],
                cache_seqlens=torch.tensor([20], device="cuda", dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 1], device="cuda", dtype=torch.int32),
                max_seqlen_q=1,
                causal=True,
                num_splits=1,
            )
            keys, values = (t[:20, 0].transpose(0, 1)[None] for t in (k, v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, enable_gqa=True
            )
            apart = (found.float().flatten() - expected.float().flatten()).abs().max().item()
            print(f"FlashAttention-3, heads of {size}: {apart:.4f}")
            if not apart < _ERROR:
                return False
    except Exception as error:
        print(
            "FlashAttention-3:",
            str(error).splitlines()[0][:200] if str(error) else type(error).__name__,
        )
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
