"""Transformer Engine loads, multiplies in every FP8 recipe of the chip near enough to bfloat16, and
attends to packed sequences as PyTorch does. Needs a GPU."""

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

# e4m3 rounds to 1 part in 16 at most: the norm of a product's error is some percent of the
# product's.
_FP8_ERROR = 0.10
_ATTENTION_ERROR = 0.05
_BLOCKWISE_FROM = (9, 0)
_LENGTHS = (96, 160, 32)
_HEADS = 8
_KV_HEADS = 4
_HEAD_SIZE = 64


def main() -> None:
    """Prints figures, and `ok` at the end."""
    _products()
    _packed_attention()
    print("ok")


def _products() -> None:
    layer = te.LayerNormLinear(
        1024, 4096, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16
    ).cuda()
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exact = layer(x)
    (exact_grad,) = torch.autograd.grad(exact.float().pow(2).sum(), x)
    recipes = [recipe.Float8CurrentScaling()]
    if torch.cuda.get_device_capability() >= _BLOCKWISE_FROM:
        recipes.append(recipe.Float8BlockScaling())
    for made in recipes:
        name = type(made).__name__
        with te.fp8_autocast(enabled=True, fp8_recipe=made):
            found = layer(x)
        (grad,) = torch.autograd.grad(found.float().pow(2).sum(), x)
        errors = _relative(found, exact), _relative(grad, exact_grad)
        print(
            f"{name}: relative error of the product {errors[0]:.4f}, of its gradient "
            f"{errors[1]:.4f}"
        )
        assert max(errors) < _FP8_ERROR, f"{name}: an error above {_FP8_ERROR} is no rounding"


def _packed_attention() -> None:
    total = sum(_LENGTHS)
    q, k, v = (
        torch.randn(
            total, heads, _HEAD_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    cu = torch.tensor([0, *_LENGTHS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    attention = te.DotProductAttention(
        _HEADS,
        _HEAD_SIZE,
        num_gqa_groups=_KV_HEADS,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    longest = max(_LENGTHS)
    found = attention(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            a.transpose(0, 1)[None],
            b.transpose(0, 1)[None],
            c.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for a, b, c in zip(q.split(_LENGTHS), k.split(_LENGTHS), v.split(_LENGTHS), strict=True)
    ]
    expected = torch.cat(parts).reshape(total, -1)
    apart = (found.reshape(total, -1).float() - expected.float()).abs().max().item()
    print(f"packed attention: largest difference {apart:.4f}")
    assert apart < _ATTENTION_ERROR, "attention to packed sequences is not PyTorch's"
    grads = torch.autograd.grad(found.float().pow(2).sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.float().pow(2).sum(), (q, k, v))
    for name, grad, other in zip("qkv", grads, wanted, strict=True):
        assert _relative(grad, other) < _ATTENTION_ERROR, f"the gradient of {name} is not PyTorch's"


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


if __name__ == "__main__":
    main()
