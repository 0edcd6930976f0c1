"""Policy losses: worked cases, and gradients by finite differences in float64."""

import math

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import importance, kl
from vapo_megatron.algorithms import policy_loss as loss
from vapo_megatron.algorithms.segments import segment_mean, to_tokens

RATIOS = [0.5, 0.9, 1.0, 1.25, 1.5]


def log_of(ratios: list[float]) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def ppo(
    ratios: list[float], advantage: float, dual_clip: float | None = None
) -> tuple[list[float], list[float]]:
    """Losses and their derivatives by the ratio."""
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs = (old + log_of(ratios)).requires_grad_()
    losses = loss.ppo_clip(logprobs, old, torch.full_like(old, advantage), 0.2, 0.28, dual_clip)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.tolist(), (gradient / torch.tensor(ratios)).tolist()


def test_ppo_clip_with_a_good_action() -> None:
    losses, slopes = ppo(RATIOS, 2.0)
    assert losses == pytest.approx([-1.0, -1.8, -2.0, -2.5, -2.56])
    assert slopes == pytest.approx([-2, -2, -2, -2, 0])


def test_ppo_clip_with_a_bad_action() -> None:
    losses, slopes = ppo(RATIOS, -2.0)
    assert losses == pytest.approx([1.6, 1.8, 2.0, 2.5, 3.0])
    assert slopes == pytest.approx([0, 2, 2, 2, 2])


def test_dual_clip_bounds_bad_actions_alone() -> None:
    assert ppo([2.9, 5.0], -2.0, dual_clip=3.0) == (
        pytest.approx([5.8, 6.0]),
        pytest.approx([2.0, 0.0]),
    )
    assert ppo([2.9, 5.0], 2.0, dual_clip=3.0)[0] == pytest.approx([-2.56, -2.56])
    assert ppo([2.9, 5.0], 0.5, dual_clip=3.0)[0] == pytest.approx([-0.64, -0.64])


def test_the_widest_and_the_narrowest_bounds() -> None:
    old = torch.zeros(2)
    advantages = torch.tensor([1.0, -1.0])
    logprobs = log_of([2.0, 0.01])
    assert loss.ppo_clip(logprobs, old, advantages, 1.0, 0.0, 1.01).tolist() == pytest.approx(
        [-1.0, 0.01]
    )
    assert importance.mis(old, 1.0, 1.0).all()
    assert (
        not loss.sao(old, old, advantages, 0.0, 0.5).any()
        and not loss.sao(old, old, advantages, 0.5, 0.0).any()
    )


def test_ratios_beyond_all_measure_stay_finite() -> None:
    logprobs = torch.tensor([0.0, 0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -200.0, 0.0])
    losses = loss.ppo_clip(logprobs, old, torch.tensor([0.0, 1.0, -1.0]), 0.2, 0.28)
    assert losses.tolist() == pytest.approx([0.0, -1.28, 0.8])
    assert loss.bounded_ratio(torch.tensor([-1e4, 1e4])).log().tolist() == pytest.approx([-20, 20])
    losses.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_clip_indicators_are_where_the_gradient_is_cut() -> None:
    ratios = RATIOS + RATIOS + [4.0]
    advantages = torch.tensor([2.0] * 5 + [-2.0] * 6, dtype=torch.float64)
    old = torch.zeros(11, dtype=torch.float64)
    logprobs = log_of(ratios).requires_grad_()
    (gradient,) = torch.autograd.grad(
        loss.ppo_clip(logprobs, old, advantages, 0.2, 0.28, 3.0).sum(), logprobs
    )
    cut = loss.clip_indicators(logprobs, advantages, 0.2, 0.28, 3.0)
    assert torch.equal(sum(cut) > 0, gradient == 0)
    assert [int(part.sum()) for part in cut] == [1, 1, 1]
    assert not loss.clip_indicators(logprobs, advantages, 0.2, 0.28)[2].any()
    small = loss.clip_indicators(logprobs, 0.01 * advantages, 0.2, 0.28, 3.0)
    assert all(torch.equal(*pair) for pair in zip(small, cut, strict=True)), (
        "the sign of an advantage counts alone"
    )
    none = loss.clip_indicators(logprobs, 0 * advantages, 0.2, 0.28, 3.0)
    assert not torch.stack(none).any(), "no bound cuts what has no advantage"


def test_a_ratio_at_its_bound_is_cut_by_sao_alone() -> None:
    """On-policy tokens, whose ratio is 1, with a clip of 0 on both sides; and one at the bound of
    dual_clip."""
    ratio_1 = torch.zeros(2)
    advantages = torch.tensor([1.0, -1.0])
    assert not torch.stack(loss.clip_indicators(ratio_1, advantages, 0.0, 0.0)).any()
    bound = float(loss.bounded_ratio(torch.tensor([1.5])))
    assert not loss.clip_indicators(torch.tensor([1.5]), -torch.ones(1), 0.2, 0.28, bound)[2].any()
    assert not torch.stack(loss.cispo_clip_indicators(ratio_1, 0.0)).any()
    assert not torch.stack(loss.dppo_clip_indicators(ratio_1, ratio_1, advantages, 0.0, 0.0)).any()
    low, high, _ = loss.sao_clip_indicators(ratio_1, 0.0, 0.0)
    assert low.all() and high.all() and not loss.sao(ratio_1, ratio_1, advantages, 0.0, 0.0).any()


def test_reinforce() -> None:
    assert loss.reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -0.5])).tolist() == [
        3.0,
        -1.0,
    ]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = log_of([0.1, 1.2, 5.0]).requires_grad_()
    losses = loss.cispo(logprobs, old, torch.tensor([1.0, -1.0, 1.0]), clip_high=0.5)
    expected = [-0.1 * math.log(0.1), 1.2 * math.log(1.2), -1.5 * math.log(5.0)]
    assert losses.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.1, 1.2, -1.5])


def test_cispo_weighs_by_old_policy_ratio_and_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    old = torch.tensor([-1.5, -1.0, -3.0])
    losses = loss.cispo(logprobs, old, torch.tensor([2.0, -3.0, 0.5]), clip_high=1.0)
    assert losses.tolist() == pytest.approx(
        [2.0 * math.exp(0.5), -3.0 * math.exp(-1) * 2.0, 0.5 * 2.0 * 0.5]
    )


def test_sao_takes_the_ratio_to_the_rollout_policy() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    rollout = torch.tensor([-1.1, -3.0])
    assert loss.sao(
        logprobs, rollout, torch.tensor([2.0, 2.0]), 0.2, 0.3
    ).tolist() == pytest.approx([-2.0 * math.exp(0.1), 0.0])


def test_dppo_bounds_the_change_of_a_probability_at_any_ratio() -> None:
    """The ratio of a rare token may be large; what moved the other way than the advantage asks is
    kept."""
    mu = torch.tensor([0.5, 0.05, 0.5, 0.5, 0.5, 1e-4])
    pi = torch.tensor([0.75, 0.075, 0.25, 0.75, 0.25, 0.1]).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    losses = loss.dppo(pi.log(), mu.log(), advantages, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(losses.sum(), pi)
    # -A min(r, 20) / pi where it is not cut
    expected = torch.tensor([0.0, -1.5 / 0.075, 0.0, 1.5 / 0.75, -0.5 / 0.25, -20 / 0.1])
    assert torch.allclose(gradient, expected, rtol=1e-4)
    low, high, dual = loss.dppo_clip_indicators(pi.log(), mu.log(), advantages, 0.2, 0.2)
    assert (low.tolist(), high.tolist(), dual.any()) == (
        [0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        False,
    )
    doubled = loss.dppo(pi.log(), mu.log(), 2 * advantages, 0.2, 0.2)
    torch.testing.assert_close(doubled, 2 * losses)
    assert doubled[[0, 2]].tolist() == [0, 0], "clipped tokens have no loss"
    # Without an advantage a probability that fell counts as cut, one that rose does not: A <= 0 and
    # A > 0.
    low, high, _ = loss.dppo_clip_indicators(pi.log(), mu.log(), 0 * advantages, 0.2, 0.2)
    assert (low.tolist(), high.any()) == ([0, 0, 1, 0, 1, 0], False)
    still = loss.dppo_clip_indicators(mu.log() + 0.01, mu.log(), -advantages.abs(), 0.2, 0.2)
    assert not torch.stack(still).any()


def test_sao_drops_tokens_outside_the_range() -> None:
    rollout = torch.zeros(4, dtype=torch.float64)
    logprobs = log_of([0.7, 0.9, 1.2, 1.4]).requires_grad_()
    losses = loss.sao(logprobs, rollout, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.3)
    assert losses.tolist() == pytest.approx([0.0, -0.9, 1.2, 0.0])
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -0.9, 1.2, 0.0])


@pytest.mark.parametrize("scale", [1e-5, 0.5])
def test_gspo_has_value_and_gradient_of_the_sequence_loss(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 4, 5, 12])
    old = -torch.rand(12, generator=generator, dtype=torch.float64)
    change = torch.randn(12, generator=generator, dtype=torch.float64) * scale
    logprobs = (old + change).requires_grad_()
    advantages = torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64)

    ratio = segment_mean(logprobs - old, cu_seqlens).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    sequence_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    (expected,) = torch.autograd.grad(sequence_loss, logprobs)

    log_ratio = to_tokens(segment_mean(logprobs - old, cu_seqlens), cu_seqlens)
    per_token = loss.gspo(logprobs, log_ratio, to_tokens(advantages, cu_seqlens), 3e-4, 4e-4)
    token_loss = segment_mean(per_token, cu_seqlens).mean()
    (gradient,) = torch.autograd.grad(token_loss, logprobs)
    torch.testing.assert_close(token_loss, sequence_loss)
    torch.testing.assert_close(gradient, expected)


def smooth_losses() -> dict[str, tuple]:
    """Losses as functions of the log-probs, at a point away from every bound."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=generator, dtype=torch.float64) - 0.1
    a = torch.randn(6, generator=generator, dtype=torch.float64)
    point = old + log_of([0.5, 0.9, 1.1, 1.25, 1.5, 4.0])
    return {
        "ppo_clip": (lambda x: loss.ppo_clip(x, old, a, 0.2, 0.28, 3.0), point),
        "reinforce": (lambda x: loss.reinforce(x, a), point),
        "sao": (lambda x: loss.sao(x, old, a, 0.2, 0.28), point),
        "k2": (lambda x: kl.k2(x, old), point),
        "k3": (lambda x: kl.k3(x, old), point),
    }


@pytest.mark.parametrize("name", list(smooth_losses()))
def test_gradient_by_finite_differences(name: str) -> None:
    function, point = smooth_losses()[name]
    assert torch.autograd.gradcheck(function, point.clone().requires_grad_())


def test_kl_estimators() -> None:
    logprobs = log_of([0.5, 0.25])
    ref = log_of([0.25, 0.5])
    ln2 = math.log(2)
    assert kl.k1(logprobs, ref).tolist() == pytest.approx([ln2, -ln2])
    assert kl.k2(logprobs, ref).tolist() == pytest.approx([ln2**2 / 2] * 2)
    assert kl.k3(logprobs, ref).tolist() == pytest.approx([0.5 - 1 + ln2, 2 - 1 - ln2])


def test_k3_of_log_probs_beyond_all_measure_is_bounded() -> None:
    far = torch.tensor([200.0, -200.0])
    near = torch.tensor([20.0, -20.0])
    assert torch.equal(kl.k3(far, torch.zeros(2)), kl.k3(near, torch.zeros(2)))


def test_kl_estimators_average_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(8, generator=generator, dtype=torch.float64).softmax(0)
    q = torch.rand(8, generator=generator, dtype=torch.float64).softmax(0)
    divergence = (p * (p / q).log()).sum()
    for estimator in (kl.k1, kl.k3):
        torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), divergence)
    logits = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    pi = logits.softmax(0)
    (exact,) = torch.autograd.grad((pi * (pi.log() - q.log())).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((pi.detach() * kl.k2(pi.log(), q.log())).sum(), logits)
    torch.testing.assert_close(of_k2, exact)


def test_truncated_and_masked_importance_weights() -> None:
    log_ratio = log_of([0.2, 0.5, 1.0, 2.0, 3.0])
    assert importance.tis(log_ratio, cap=2.0).tolist() == pytest.approx([0.2, 0.5, 1, 2, 2])
    assert importance.mis(log_ratio, low=0.4, high=2.5).tolist() == pytest.approx([0, 0.5, 1, 2, 0])
    assert importance.tis(torch.tensor([500.0, -500.0]), cap=2.0).isfinite().all()


def test_where_cispo_and_sao_cut() -> None:
    log_ratio = log_of([0.5, 0.8, 1.0, 1.28, 1.5])
    low, high, dual = loss.cispo_clip_indicators(log_ratio, 0.4)
    assert high.tolist() == [0, 0, 0, 0, 1] and not low.any() and not dual.any()
    low, high, dual = loss.sao_clip_indicators(log_ratio, 0.3, 0.2)
    assert low.tolist() == [1, 0, 0, 0, 0] and high.tolist() == [0, 0, 0, 1, 1] and not dual.any()
