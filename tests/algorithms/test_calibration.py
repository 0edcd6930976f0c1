"""Calibrated values: the regression against a loop, critics that are wrong in known ways, and the
bias of the gradient."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration
from vapo_megatron.algorithms.baselines import leave_one_out, siblings_mean
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.data.batch import offsets

CHANCE = torch.Generator()


def step(responses: int, group: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds, group ids, returns, and the mean return of each token's state: a walk."""
    CHANCE.manual_seed(seed)
    lengths = torch.randint(1, 40, (responses,), generator=CHANCE)
    bounds = offsets(lengths)
    steps = torch.randn(int(bounds[-1]), generator=CHANCE) * 0.2
    expected = torch.cat([part.cumsum(0) for part in steps.split(lengths.tolist())])
    ends = expected[bounds[1:] - 1]
    return (
        bounds,
        torch.arange(responses) // group,
        ends + torch.randn(responses, generator=CHANCE),
        expected,
    )


def fit(
    values: Tensor, bounds: Tensor, groups: Tensor, returns: Tensor
) -> calibration.Coefficients:
    siblings = siblings_mean(returns, groups)
    return calibration.coefficients(
        calibration.moments(
            calibration.response_sums(values[None], bounds), returns, siblings[None]
        )
    )


@pytest.mark.parametrize("group", [1, 4])
def test_coefficients_are_those_of_a_regression_written_out(group: int) -> None:
    bounds, groups, returns, expected = step(64, group, 1)
    siblings = siblings_mean(returns, groups)
    by_bin: dict[int, list[tuple[np.ndarray, float, float, int]]] = {}
    for s in range(64):
        others = [float(returns[i]) for i in range(64) if groups[i] == groups[s] and i != s]
        m = sum(others) / len(others) if others else 0.0
        assert float(siblings[s]) == pytest.approx(m)
        for place in range(int(bounds[s]), int(bounds[s + 1])):
            bin_of = int(np.log2(place - int(bounds[s]) + 1))
            x = np.array([1.0, float(expected[place]), m])
            by_bin.setdefault(bin_of, []).append((x, float(returns[s]), m, s))

    def solve(
        rows: list[tuple[np.ndarray, float, float]], n: float, prior: np.ndarray
    ) -> np.ndarray:
        """Least squares of rows with weights, and of the prior as one more row for each
        coefficient."""
        x = np.stack(
            [w**0.5 * r[0] for r in rows for w in [r[2]]]
            + list(np.sqrt(0.2 * 8 + 1e-9 * n) * np.eye(3))
        )
        shrunk = prior * (0.2 * 8) / (0.2 * 8 + 1e-9 * n)
        y = np.array(
            [w**0.5 * r[1] for r in rows for w in [r[2]]]
            + list(np.sqrt(0.2 * 8 + 1e-9 * n) * shrunk)
        )
        return np.linalg.lstsq(x, y, rcond=None)[0]

    weighted = {}
    for bin_of, rows in by_bin.items():
        reached = len({row[3] for row in rows})
        weighted[bin_of] = [(x, r, reached / len(rows)) for x, r, _, _ in rows], reached
    everything = [row for rows, _ in weighted.values() for row in rows]
    total = sum(reached for _, reached in weighted.values())
    of_all = solve(everything, total, np.array([0.0, 0.0, 1.0]))
    found = fit(expected, bounds, groups, returns)
    trust = 0.0
    for bin_of, (rows, reached) in weighted.items():
        c = solve(rows, reached, of_all)
        assert found.bins[bin_of].numpy() == pytest.approx(c, abs=1e-6)
        trust += reached * min(max(2 * c[1], 0), 1) / total
    assert found.trust == pytest.approx(trust)
    assert found.bins[len(weighted)].numpy() == pytest.approx(of_all, abs=1e-6), (
        "a bin that nobody reached"
    )


def error(values: Tensor, past: calibration.Coefficients, seed: int = 2) -> float:
    """Mean square of R - V~ on another step with the same critic."""
    bounds, groups, returns, _ = step(2000, 4, seed)
    siblings = siblings_mean(returns, groups)
    calibrated = calibration.calibrated_values(values, siblings, bounds, past)
    return float((to_tokens(returns, bounds) - calibrated).square().mean())


CRITICS = {
    "right": lambda v: v,
    "shifted": lambda v: v + 3,
    "scaled": lambda v: 5 * v,
    "timid": lambda v: 0.3 * v,
    "flipped": lambda v: -v,
    "delayed": lambda v: v.roll(1),
    "noise": lambda v: torch.randn(len(v), generator=torch.Generator().manual_seed(3)),
}


def test_a_wrong_critic_is_set_right_or_not_trusted() -> None:
    bounds, groups, returns, expected = step(2000, 4, 1)
    fits = {name: fit(wrong(expected), bounds, groups, returns) for name, wrong in CRITICS.items()}
    later = step(2000, 4, 2)[3]
    errors = {name: error(wrong(later), fits[name]) for name, wrong in CRITICS.items()}
    for name in ("shifted", "scaled", "timid", "flipped"):
        assert errors[name] == pytest.approx(errors["right"], rel=0.02), (
            "a line of the right values says as much"
        )
    blind = error(torch.zeros_like(later), fit(torch.zeros_like(expected), bounds, groups, returns))
    assert errors["right"] < errors["delayed"] < blind
    assert errors["noise"] == pytest.approx(blind, rel=0.02)
    assert fits["right"].trust > 0.95 and fits["timid"].trust > 0.95
    assert fits["scaled"].trust == pytest.approx(2 * fits["scaled"].slope, rel=1e-6), (
        "trust is 1 from a slope of 1/2"
    )
    assert 0.1 < fits["scaled"].slope < 0.3
    assert fits["flipped"].trust == 0 and fits["flipped"].slope < 0 and fits["noise"].trust < 0.1


def test_trust_is_half_where_half_of_the_positions_are_known() -> None:
    """The trust is a mean over positions, not that of a mean slope, which would be 1 here."""
    count = 4000
    CHANCE.manual_seed(5)
    returns = torch.randn(count, generator=CHANCE)
    bounds = offsets(torch.full((count,), 3))
    groups = torch.arange(count)
    values = to_tokens(returns.clone(), bounds)
    values[bounds[:-1]] = torch.randn(count, generator=CHANCE)  # the first token: bin 0
    found = fit(values, bounds, groups, returns)
    assert found.slope == pytest.approx(0.5, abs=0.03)
    assert found.trust == pytest.approx(0.5, abs=0.05)


def test_past_steps_fade() -> None:
    bounds, groups, returns, expected = step(400, 4, 1)
    sums = calibration.response_sums(expected[None], bounds)
    siblings = siblings_mean(returns, groups)
    first = calibration.moments(sums, returns, siblings[None])
    second = calibration.moments(sums, -returns, siblings[None])
    both = first.followed_by(second)
    for joint, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(joint, 0.7 * a + b)
    restored = calibration.Moments.from_state(both.state())
    assert all(torch.equal(a, b) for a, b in zip(both, restored, strict=True))


def test_without_a_past_the_others_are_the_baseline() -> None:
    returns = torch.tensor([1.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([7, 7, 7, 9])
    siblings = siblings_mean(returns, groups)
    others = leave_one_out(returns, groups)
    assert siblings.tolist() == [0.5, 1.0, 0.5, 0.0], (
        "in a group of one it would be a line in the return itself"
    )
    assert others.tolist() == pytest.approx([0.5, 1.0, 0.5, 2 / 3])
    bounds = offsets(torch.tensor([1, 2, 1, 1]))
    values = torch.tensor([5.0, -3.0, 2.0, 9.0, 4.0])
    baseline, trust = calibration.baseline_and_trust(values, siblings, others, bounds, None)
    assert trust == 0, "nothing is known of the critic yet"
    assert baseline.tolist() == pytest.approx([0.5, 1.0, 1.0, 0.5, 2 / 3]), (
        "whatever the critic says"
    )
    past = fit(values, bounds, groups, returns)
    baseline, trust = calibration.baseline_and_trust(values, siblings, others, bounds, past)
    assert trust == past.trust
    assert torch.equal(baseline, calibration.calibrated_values(values, siblings, bounds, past))


def gradient(group: int, trust: float, lam: float = 0.5, leak: str = "") -> tuple[Tensor, Tensor]:
    """Exact expectation of A grad log pi over all groups of responses of a small MDP, and the
    gradient of E[R].

    Three binary tokens; a 1 as second token ends the response. States have separate logits, and
    values that are wrong. leak: the statistic that sees the response's own return, "siblings" (m)
    or "values" (the critic).
    """
    logits = torch.tensor([0.3, -0.4, 0.8, 0.1, -0.7], dtype=torch.float64, requires_grad=True)
    states = {(): 0, (0,): 1, (1,): 2, (0, 0): 3, (1, 0): 4}
    wrong = torch.tensor([0.9, -2.0, 0.5, 0.4, 3.0])
    endings = [
        y for n in (2, 3) for y in itertools.product((0, 1), repeat=n) if (y[1] == 1) == (n == 2)
    ]
    rewards = dict(zip(endings, (0.2, -1.0, 0.7, 1.0, -0.3, 0.5), strict=True))
    past = calibration.Coefficients(
        torch.randn(calibration.BINS, 3, dtype=torch.float64, generator=CHANCE), 0, 0, 0
    )

    def log_prob(y: tuple[int, ...]) -> Tensor:
        """[T]"""
        at = torch.stack([logits[states[y[:t]]] for t in range(len(y))])
        return torch.nn.functional.logsigmoid(torch.where(torch.tensor(y) == 1, at, -at))

    objective = torch.zeros((), dtype=torch.float64)
    surrogate = torch.zeros((), dtype=torch.float64)
    for ys in itertools.product(endings, repeat=group):
        chance = torch.stack([log_prob(y).sum() for y in ys]).sum().exp()
        returns = torch.tensor([rewards[y] for y in ys])
        bounds = offsets(torch.tensor([len(y) for y in ys]))
        siblings = siblings_mean(returns, torch.zeros(group, dtype=torch.int64))
        siblings = returns.double() if leak == "siblings" else siblings
        values = wrong[torch.tensor([states[y[:t]] for y in ys for t in range(len(y))])]
        values = values + to_tokens(returns, bounds) if leak == "values" else values
        baseline, _ = calibration.baseline_and_trust(
            values, siblings, torch.zeros(group), bounds, past
        )
        tokens = place_terminal(returns, bounds, int(bounds[-1]))
        advantages = calibration.trusted_advantages(
            tokens, baseline, bounds, torch.full((group,), lam), trust
        )
        objective = objective + chance * returns.mean()
        log_probs = torch.cat([log_prob(y) for y in ys])
        surrogate = surrogate + chance.detach() * (advantages * log_probs).sum() / group
    ours, true = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (surrogate, objective)
    )
    return ours, true


@pytest.mark.parametrize(("trust", "lam"), [(0.0, 0.5), (0.6, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("group", [1, 2])
def test_without_trust_or_with_lambda_1_the_gradient_is_unbiased(
    group: int, trust: float, lam: float
) -> None:
    """Whatever the critic says, as long as it does not know the return that was sampled."""
    CHANCE.manual_seed(5)
    ours, true = gradient(group, trust, lam)
    torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("trust", "lam", "leak"),
    [(1.0, 0.5, ""), (0.6, 0.5, ""), (0.0, 0.5, "siblings"), (0.6, 1.0, "values")],
)
def test_what_makes_it_biased_is_noticed(trust: float, lam: float, leak: str) -> None:
    """Trust in a wrong critic where lambda is below 1; a baseline or a critic that knows the
    response's own return."""
    CHANCE.manual_seed(5)
    ours, true = gradient(2, trust, lam, leak)
    assert (ours - true).norm() > 0.05


def test_every_token_of_a_response_of_a_million_is_in_a_bin() -> None:
    tokens = 2**20
    ones = torch.ones(1, tokens)
    counts, sums, _ = calibration.response_sums(ones, torch.tensor([0, tokens])).unbind(-1)
    assert counts.sum() == sums.sum() == tokens
    assert counts[0, -1] == tokens - 2**19 + 1
