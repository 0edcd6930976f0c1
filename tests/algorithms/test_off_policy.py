"""Off-policy corrections against loops and the papers' sums, and what must hold of them whatever
the numbers."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import importance
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda, segmented_gae
from vapo_megatron.algorithms.importance import corrected_gae, varying_suffix_scan

LENGTHS = [0, 1, 5, 16, 17, 300, 0, 2500, 33, 0]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def draw(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, values, log ratios: [T] each."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, log_ratio = (torch.randn(sum(lengths), generator=generator) for _ in range(3))
    return rewards, values, 0.5 * log_ratio


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def loop(
    rewards: Tensor,
    values: Tensor,
    lengths: list[int],
    lam: list[float],
    rho: Tensor,
    c: Tensor,
    gamma: float,
    boot: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token at a time from the end, in float64: (A, v) of one lambda per response."""
    r, v, weights, traces = (x.double().tolist() for x in (rewards, values, rho, c))
    advantages = [0.0] * len(r)
    targets = [0.0] * len(r)
    end = 0
    for response, length in enumerate(lengths):
        start = end
        end = end + length
        correction = 0.0
        next_value = float(boot[response])
        for t in range(end - 1, start - 1, -1):
            delta = r[t] + gamma * next_value - v[t]
            advantages[t] = delta + gamma * lam[response] * correction
            correction = weights[t] * delta + gamma * lam[response] * traces[t] * correction
            next_value, targets[t] = v[t], v[t] + correction
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (1.5, 1.2), (0.0, 0.0)])
def test_equals_the_loop_over_tokens(rho_bar: float, c_bar: float, gamma: float) -> None:
    rewards, values, log_ratio = draw(LENGTHS)
    rho = importance.tis(log_ratio, rho_bar)
    c = importance.tis(log_ratio, c_bar)
    lam = length_adaptive_lambda(torch.tensor(LENGTHS), 0.05)
    boot = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(2))
    advantages, targets = corrected_gae(
        rewards, values, bounds(LENGTHS), lam, 0.9, rho, c, gamma, boot
    )
    assert advantages.dtype == targets.dtype == torch.float32
    numbers = (rho, c, gamma, boot)
    assert_close(advantages, loop(rewards, values, LENGTHS, lam.tolist(), *numbers)[0])
    assert_close(targets, loop(rewards, values, LENGTHS, [0.9] * len(LENGTHS), *numbers)[1])


def test_targets_are_the_sum_in_impala() -> None:
    # v_s = V_s + sum_t gamma^(t-s) prod_{i=s}^{t-1} c_i rho_t (r_t + gamma V_{t+1} - V_t), one
    # product at a time.
    rewards, values, log_ratio = draw([9])
    rho = importance.tis(log_ratio, 1.4)
    c = importance.tis(log_ratio, 1.0)
    gamma = 0.95
    lam = 0.9
    boot = torch.tensor([0.7])
    found = corrected_gae(rewards, values, bounds([9]), lam, lam, rho, c, gamma, boot)
    following = torch.cat([values[1:], boot]).double()
    targets = [
        float(values[s])
        + sum(
            gamma ** (t - s)
            * float((lam * c[s:t].double()).prod())
            * float(rho[t] * (rewards[t] + gamma * following[t] - values[t]))
            for t in range(s, 9)
        )
        for s in range(9)
    ]
    torch.testing.assert_close(
        found[1].double(), torch.tensor(targets, dtype=torch.float64), atol=1e-5, rtol=1e-5
    )
    # q_s = r_s + gamma v_{s+1} at lambda 1; with lambda, (1 - lambda) of it is V.
    after = lam * torch.tensor([*targets[1:], float(boot)]) + (1 - lam) * following
    torch.testing.assert_close(
        found[0].double(), rewards + gamma * after - values, atol=1e-5, rtol=1e-5
    )


def test_weights_cut_at_one_give_the_advantages_of_retrace() -> None:
    # sum_t gamma^t prod_{i=1}^{t} c_i delta_t with c_i = lambda min(1, pi / mu) of the tokens after
    # the first.
    rewards, values, log_ratio = draw([12], seed=4)
    w = importance.tis(log_ratio, 1.0)
    gamma = 0.9
    lam = 0.8
    advantages, _ = corrected_gae(rewards, values, bounds([12]), lam, 1.0, w, w, gamma)
    following = torch.cat([values[1:], torch.zeros(1)])
    delta = (rewards + gamma * following - values).double()
    c = lam * log_ratio.double().exp().clamp(max=1)
    expected = [
        sum(gamma ** (t - s) * c[s + 1 : t + 1].prod() * delta[t] for t in range(s, 12))
        for s in range(12)
    ]
    torch.testing.assert_close(advantages.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_with_all_ratios_one_it_is_gae() -> None:
    rewards, values, _ = draw(LENGTHS)
    lam = length_adaptive_lambda(torch.tensor(LENGTHS), 0.05)
    boot = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(2))
    ones = importance.tis(torch.zeros_like(values), 1.0)
    expected = decoupled_gae(rewards, values, bounds(LENGTHS), lam, 1.0, 0.99, boot)
    found = corrected_gae(rewards, values, bounds(LENGTHS), lam, 1.0, ones, ones, 0.99, boot)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_weights_towards_zero_leave_critic_and_one_step_error() -> None:
    rewards, values, log_ratio = draw([40, 3])
    cu_seqlens = bounds([40, 3])
    none = torch.zeros(43)
    one = importance.tis(log_ratio, 1.0)
    step = segmented_gae(rewards, values, cu_seqlens, 0.0)
    # rho = c = 0: nothing is learnt; c = 0 alone: weighted one-step targets.
    advantages, targets = corrected_gae(rewards, values, cu_seqlens, 1.0, 1.0, none, none)
    assert torch.equal(targets, values) and torch.equal(advantages, step)
    _, targets = corrected_gae(rewards, values, cu_seqlens, 1.0, 1.0, one, none)
    torch.testing.assert_close(targets, values + one * step)


def test_a_weight_of_zero_ends_what_earlier_tokens_see() -> None:
    rewards, values, log_ratio = draw([50])
    log_ratio = log_ratio.clamp(-0.6, 0.6)
    log_ratio[20] = 3.0
    w = importance.mis(log_ratio, 0.5, 2.0)
    assert w[20] == 0 and bool((w[:20] > 0).all())
    before = corrected_gae(rewards, values, bounds([50]), 1.0, 1.0, w, w)
    rewards[20:] += 5
    after = corrected_gae(rewards, values, bounds([50]), 1.0, 1.0, w, w)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:20], other[:20])
        assert not torch.equal(one[21:], other[21:])


def test_an_overflowing_response_does_not_reach_into_others() -> None:
    lengths = [30, 400, 20]
    rewards, values, log_ratio = draw(lengths)
    log_ratio[30:430] = 20.0
    w = importance.tis(log_ratio, 1e8)
    packed = corrected_gae(rewards, values, bounds(lengths), 1.0, 1.0, w, w)
    assert all(bool(x.isfinite().all()) for x in packed)
    for x in (slice(0, 30), slice(430, 450)):
        n = x.stop - x.start
        alone = corrected_gae(rewards[x], values[x], bounds([n]), 1.0, 1.0, w[x], w[x])
        for one, other in zip(packed, alone, strict=True):
            assert_close(one[x], other.double())


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 256, 257, 5000])
def test_a_scan_of_any_length(length: int) -> None:
    x, decays, _ = draw([length])
    decays = decays.abs().clamp(max=1)
    expected = torch.zeros(length, dtype=torch.float64)
    following = 0.0
    for t in range(length - 1, -1, -1):
        following = expected[t] = float(x[t]) + float(decays[t]) * following
    before = x.clone(), decays.clone()
    found = varying_suffix_scan(x, decays)
    assert torch.equal(x, before[0]) and torch.equal(decays, before[1])
    assert found.shape == expected.shape
    if length:
        assert_close(found, expected)


def token_mdp() -> tuple[Tensor, Tensor, Tensor]:
    """Three tokens of 3 words: log pi, log mu [3, 3, 3] by place, last token and token; reward by
    last two tokens."""
    generator = torch.Generator().manual_seed(7)
    pi, mu = torch.randn(2, 3, 3, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    return pi, mu, torch.randn(3, 3, generator=generator, dtype=torch.float64)


def test_vtrace_fixed_point_over_all_responses() -> None:
    pi, mu, reward = token_mdp()
    words = torch.cartesian_prod(*[torch.arange(3)] * 3)  # all 27 responses
    last = torch.cat([torch.zeros(27, 1, dtype=torch.long), words[:, :2]], 1)
    place = torch.arange(3).expand(27, 3)
    log_ratio = (pi - mu)[place, last, words].flatten()
    chance = mu[place, last, words].sum(1).exp()
    # Values of pi by place and last token, from the end.
    v = [torch.empty(0)] * 3
    v[2] = (pi[2].exp() * reward).sum(1)
    v[1] = (pi[1].exp() * v[2]).sum(1)
    v[0] = (pi[0].exp() * v[1]).sum(1)
    critic = torch.zeros(81, dtype=torch.float64) + 0.3  # a critic that knows nothing
    rewards = torch.zeros(27, 3, dtype=torch.float64)
    rewards[:, 2] = reward[words[:, 1], words[:, 2]]

    def expected_target(cap: float) -> float:
        w = importance.tis(log_ratio, cap)
        _, targets = corrected_gae(rewards.flatten(), critic, bounds([3] * 27), 1.0, 1.0, w, w)
        return float((chance * targets.view(27, 3)[:, 0]).sum())

    assert expected_target(1e6) == pytest.approx(float(v[0][0]), abs=1e-9)
    assert expected_target(0.0) == pytest.approx(0.3)
    assert abs(expected_target(1.0) - float(v[0][0])) > 1e-3
    # On-policy, cut or not, targets equal Monte Carlo.
    same = importance.tis(torch.zeros_like(log_ratio), 1.0)
    _, targets = corrected_gae(rewards.flatten(), critic, bounds([3] * 27), 1.0, 1.0, same, same)
    assert float(
        (pi[place, last, words].sum(1).exp() * targets.view(27, 3)[:, 0]).sum()
    ) == pytest.approx(float(v[0][0]))


def test_corrections_beyond_all_measure_stay_finite() -> None:
    huge = torch.tensor([3e38, 3e38])
    ones = torch.ones(2)
    for sign in (1, -1):
        _, targets = corrected_gae(sign * huge, torch.zeros(2), bounds([2]), 1.0, 1.0, ones, ones)
        assert targets.tolist() == [sign * torch.finfo(torch.float32).max, float(sign * huge[1])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": torch.zeros(4)}, "rho and c must be"),
        ({"lam_policy": 1.5}, "lambda must be in"),
        ({"gamma": 2.0}, "gamma"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    fitting = {
        "rewards": torch.zeros(5),
        "values": torch.zeros(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }
    fitting |= {"lam_policy": 0.9, "lam_critic": 1.0, "rho": torch.ones(5), "c": torch.ones(5)}
    with pytest.raises(ValueError, match=message):
        corrected_gae(**(fitting | change))
