"""Block scales against an independent computation, and where FP8 applies."""

import math

import pytest
import torch
from specs import spec_of

from vapo_megatron.config.model import PrecisionConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.engine_limits import engine_fp8
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.fp8 import BLOCK, FP8, BlockFp8, check_blocks, dequantize, quantize

SHAPES = [(256, 384), (128, 128), (200, 130), (1, 5), (128, 129)]


def e4m3_values() -> list[float]:
    """Every finite magnitude of e4m3fn: 4 exponent bits of bias 7, 3 mantissa bits, the highest
    code is NaN."""
    subnormal = [mantissa / 8 * 2**-6 for mantissa in range(8)]
    normal = [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for mantissa in range(8)
    ]
    return (subnormal + normal)[:-1]


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block; each value becomes the nearest that e4m3 has."""
    rows, columns = weight.shape
    table = torch.tensor(e4m3_values())
    scales = torch.empty(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    back = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            block = weight[place]
            scales[i, j] = block.abs().max() / 448
            nearest = (block.abs()[..., None] / scales[i, j] - table).abs().argmin(-1)
            back[place] = table[nearest] * block.sign() * scales[i, j]
    return back, scales


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_scales_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[1])
    values, scales = quantize(weight)
    expected, expected_scales = reference(weight)
    assert values.dtype == FP8 and values.shape == weight.shape and values.is_contiguous()
    assert scales.dtype == torch.float32
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    got = dequantize(values, scales)
    # Where a value lies in the middle of two, either is right: both are equally far.
    torch.testing.assert_close(
        (got - weight).abs(), (expected - weight).abs(), rtol=1e-4, atol=1e-6
    )


def test_scales_that_are_powers_of_two_lose_no_value() -> None:
    torch.manual_seed(1)
    weight = torch.randn(256, 256)
    weight[:BLOCK, :BLOCK] *= 448 / weight[:BLOCK, :BLOCK].abs().max()  # the scale is 1 exactly
    values, scales = quantize(weight, power_of_two=True)
    _, exact = quantize(weight)
    assert torch.equal(torch.exp2(scales.log2().round()), scales)
    assert ((scales >= exact * (1 - 1e-6)) & (scales < 2 * exact)).all()
    assert values.float().isfinite().all() and values.float().abs().max() <= 448


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_block_of_zeros_stays_zero(power_of_two: bool) -> None:
    values, scales = quantize(torch.zeros(130, 128), power_of_two)
    assert torch.equal(scales, torch.ones(2, 1)) and not values.float().any()


def test_weights_of_bfloat16_are_quantised_as_what_they_are() -> None:
    weight = torch.randn(128, 256).bfloat16()
    assert all(
        torch.equal(a.float(), b.float())
        for a, b in zip(quantize(weight), quantize(weight.float()), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("model.layers.3.self_attn.q_proj.weight", True),
        ("model.layers.3.mlp.experts.17.down_proj.weight", True),
        ("model.layers.10.mlp.up_proj.weight", True),
        ("model.layers.3.mlp.gate.weight", False),  # the router
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("model.layers.3.self_attn.q_norm.weight", False),
        ("model.layers.3.input_layernorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_linear_layers_alone_are_quantised(name: str, covered: bool) -> None:
    recipe = BlockFp8.of(spec_of("qwen3_moe" if "experts" in name else "qwen3"))
    assert recipe.covers(name) == covered
    [bucket] = recipe.convert([[(name, torch.randn(128, 128))]])
    assert [given for given, _ in bucket] == ([name, f"{name}_scale_inv"] if covered else [name])


def test_an_engine_whose_ranks_would_cut_blocks_is_refused() -> None:
    spec = spec_of(
        "qwen3",
        num_hidden_layers=1,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
    )
    check_blocks(spec, 1)
    with pytest.raises(
        BadInput,
        match=r"keys have 128 features, expected a multiple of 128 x 2, the GPUs of rollout\.tp=2",
    ):
        check_blocks(spec, 2)
    apart = {
        "tp": 2,
        "quantization": "fp8",
        "load_format": "dummy",
        "server_args": {"attn_dp_size": 2},
    }
    assert engine_fp8(RolloutConfig.model_validate(apart), PrecisionConfig(), spec), (
        "each GPU has whole heads"
    )
