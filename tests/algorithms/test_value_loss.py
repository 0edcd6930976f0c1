"""Value losses."""

import math

import pytest
import torch

from vapo_megatron.algorithms import value_loss as vl


def test_mse() -> None:
    assert vl.value_mse(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 1.0])).tolist() == [0.5, 0.125]


def test_clipped() -> None:
    # From old 0 towards 1 with a step of 0.2: a value past 0.2 is held at the error of 0.2, with no
    # gradient.
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    losses = vl.clipped_value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2)
    assert losses.tolist() == pytest.approx([0.405, 0.32, 1.125])
    losses.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])
    # From old 1 towards -1: the same the other way round, and the held value is old - 0.2.
    losses = vl.clipped_value_loss(1 - values, torch.ones(3), torch.full((3,), -1.0), clip=0.2)
    assert losses.tolist() == pytest.approx([1.9**2 / 2, 1.8**2 / 2, 2.5**2 / 2])


def test_hl_gauss_target_has_the_return_as_its_mean() -> None:
    returns = torch.tensor([-0.5, 0.0, 0.37])
    logits = torch.zeros(3, 51, requires_grad=True)
    (gradient,) = torch.autograd.grad(vl.hl_gauss(logits, returns, -1, 1).sum(), logits)
    target = torch.full((3, 51), 1 / 51) - gradient
    assert (target >= -1e-6).all()
    torch.testing.assert_close(target.sum(1), torch.ones(3))
    place = (torch.linspace(-1, 1, 52)[1:] - 1 / 51 - returns[:, None]) / (2 / 51)
    # In bins: of the Gaussian, and of a bin's own width
    spread = (target * place.square()).sum(1).sqrt()
    torch.testing.assert_close(
        spread, torch.full((3,), (0.75**2 + 1 / 12) ** 0.5), rtol=1e-2, atol=0
    )
    torch.testing.assert_close(
        vl.hl_gauss_value(target.clamp(min=1e-12).log(), -1, 1), returns, atol=1e-3, rtol=0
    )


def test_hl_gauss_at_its_edges_keeps_its_mass_in_float32() -> None:
    returns = torch.tensor([-1.0, 1.0, 50.0])
    logits = torch.zeros(3, 11, requires_grad=True)
    losses = vl.hl_gauss(logits, returns, -1, 1)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    target = torch.full((3, 11), 1 / 11) - gradient
    torch.testing.assert_close(target.sum(1), torch.ones(3))
    assert torch.equal(target[1], target[2]) and losses.tolist() == pytest.approx(
        [math.log(11)] * 3
    )
    coarse = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = vl.hl_gauss(coarse, returns.double(), -1, 1)
    assert found.dtype == torch.float32 and torch.equal(
        found, vl.hl_gauss(coarse.float(), returns, -1, 1)
    )


def test_hl_gauss_learns_the_return() -> None:
    returns = torch.tensor([-0.8, 0.1, 0.9])
    logits = torch.zeros(3, 41, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        vl.hl_gauss(logits, returns, -1.2, 1.2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(vl.hl_gauss_value(logits, -1.2, 1.2), returns, atol=0.02, rtol=0)


def test_hl_gauss_out_of_range() -> None:
    far = vl.hl_gauss(torch.zeros(2, 11), torch.tensor([50.0, -50.0]), -1, 1)
    assert far.isfinite().all()


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(5, generator=generator, dtype=torch.float64)
    values = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(5, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: vl.value_mse(v, returns), values)
    assert torch.autograd.gradcheck(lambda v: vl.clipped_value_loss(v, old, returns, 0.2), values)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    point = torch.tensor([-0.4, 0.1, 0.6])
    assert torch.autograd.gradcheck(lambda x: vl.hl_gauss(x, point, -1, 1), logits)


def test_an_arctangent_takes_every_output_into_the_range() -> None:
    found = vl.arctan_value(torch.tensor([-1e6, -1.0, 0.0, 1.0, 1e6]), low=-1.0, high=3.0)
    assert found.tolist() == pytest.approx([-1.0, 0.0, 1.0, 2.0, 3.0], abs=1e-4)


def test_squashed_value_stays_in_range_and_is_linear_in_middle() -> None:
    outputs = torch.tensor([0.0, 0.01, 1.0, -50.0, 50.0], dtype=torch.float64)
    found = vl.bounded_value(outputs, low=-1.0, high=3.0)
    assert found.tolist() == pytest.approx([1.0, 1.01, 1 + 2 * math.tanh(0.5), -1.0, 3.0], abs=1e-6)
