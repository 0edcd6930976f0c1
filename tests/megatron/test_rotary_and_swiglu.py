"""The layers' own rotation and activation equal the formulas written out, gradients too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.data.microbatch import local_positions
from vapo_megatron.megatron.activations import clamped_swiglu, swiglu
from vapo_megatron.megatron.rotary import RotaryTables, rotate
from vapo_megatron.megatron.schedule import packed_sequences

INV_FREQ = 10000.0 ** -(torch.arange(4) / 4)


def gradients(output: Tensor, x: Tensor) -> Tensor:
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((output * weight).sum(), x)[0]


@pytest.mark.parametrize("cp,rank", [(1, 0), (2, 0), (2, 1)])
def test_each_token_is_rotated_by_its_position_in_its_sequence(cp: int, rank: int) -> None:
    lengths = [8, 4, 12]
    positions = torch.cat([torch.arange(n) for n in lengths])[local_positions(lengths, cp, rank)]
    x = torch.randn(
        len(positions), 3, 8, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones(1), positions[:, None, None] * INV_FREQ
    )
    expected = torch.cat((turned.real, turned.imag), -1)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    found = rotate(x, *RotaryTables(INV_FREQ, cp, rank).of(cu_seqlens, torch.float32))
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(gradients(found, x), gradients(expected, x), atol=1e-6)


def test_only_the_first_channels_are_rotated_with_fewer_angles() -> None:
    x = torch.randn(12, 3, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    tables = RotaryTables(INV_FREQ, 1, 0).of(cu_seqlens, torch.float32)
    expected = torch.cat((rotate(x[..., :8], *tables), x[..., 8:]), -1)
    found = rotate(x, *tables)
    assert torch.equal(found, expected)
    assert torch.equal(gradients(found, x), gradients(expected, x))


def test_interleaved_pairs_are_neighbours() -> None:
    x = torch.randn(12, 3, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    tables = RotaryTables(INV_FREQ, 1, 0).of(cu_seqlens, torch.float32)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    inverse = torch.tensor(order).argsort()
    expected = rotate(x[..., order], *tables)[..., inverse]
    found = rotate(x, *tables, interleaved=True)
    assert torch.equal(found, expected)
    assert torch.equal(gradients(found, x), gradients(expected, x))


def test_tables_are_made_once_per_micro_batch() -> None:
    tables = RotaryTables(INV_FREQ, 1, 0)
    first, second = (torch.tensor([0, n, 10], dtype=torch.int32) for n in (4, 6))
    cos, _ = tables.of(first, torch.float32)
    assert tables.of(first, torch.float32)[0] is cos
    assert tables.of(first, torch.bfloat16)[0].dtype == torch.bfloat16
    assert torch.equal(tables.of(second, torch.float32)[0][6:], cos[:4])


def test_swiglu_is_the_gated_activation() -> None:
    x = torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up
    found = swiglu(x)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(gradients(found, x), gradients(expected, x), atol=1e-6)


def test_attention_reads_where_sequences_begin() -> None:
    packed = packed_sequences((5, 3, 2000), torch.device("cpu"))
    assert packed.cu_seqlens_q.dtype == torch.int32 and packed.cu_seqlens_q.tolist() == [
        0,
        5,
        8,
        2008,
    ]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 2000


def test_the_clamped_activation_has_the_gradients_of_its_formula() -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    x.requires_grad_()
    found = clamped_swiglu(x, 1.702, 1.5)
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=1.5)
    expected = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-1.5, 1.5) + 1)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    mine, theirs = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(mine, theirs)
