"""TETHER: the mixture that predicts best beside a search for it, and a gradient without bias."""

import itertools

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import tether
from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.algorithms.calibration import response_sums
from vapo_megatron.algorithms.gae import segmented_gae
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.data.batch import offsets

CHANCE = torch.Generator()


def step(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds, returns, B and the right value of each token's state: 64 groups of 4, of which the
    first token says half."""
    CHANCE.manual_seed(seed)
    bounds = offsets(torch.randint(1, 30, (256,), generator=CHANCE))
    prompt = torch.randn(64, generator=CHANCE).repeat_interleave(4)
    own = torch.randn(256, generator=CHANCE)
    returns = prompt + own + 0.3 * torch.randn(256, generator=CHANCE)
    others = leave_one_out(returns, torch.arange(256) // 4)
    return bounds, returns, others, to_tokens(prompt + own, bounds)


def error(rho: float, values: Tensor, others: Tensor, returns: Tensor, bounds: Tensor) -> float:
    """Sum over tokens of (R - b)^2."""
    baseline = tether.baseline(values, others, bounds, rho)
    return float((to_tokens(returns, bounds) - baseline).double().square().sum())


def fitted(values: Tensor, others: Tensor, returns: Tensor, bounds: Tensor) -> float:
    best = tether.best_mixture(response_sums(values[None], bounds), returns, others)
    assert best is not None
    return best


CRITICS = {
    "right": (lambda v: v, 0.9, 1.0),
    "noisy": (lambda v: v + torch.randn(len(v), generator=CHANCE), 0.2, 0.8),
    "flipped": (lambda v: -v, 0.0, 0.0),
    "timid": (lambda v: 0.5 * v, 0.6, 1.0),
}


@pytest.mark.parametrize("critic", CRITICS)
def test_no_other_mixture_predicts_returns_better(critic: str) -> None:
    bounds, returns, others, right = step(1)
    wrong, low, high = CRITICS[critic]
    values = wrong(right)
    best = fitted(values, others, returns, bounds)
    assert low <= best <= high
    least = error(best, values, others, returns, bounds)
    for rho in torch.linspace(0, 1, 101).tolist():
        assert least <= error(rho, values, others, returns, bounds) * (1 + 1e-6), rho


def test_the_weight_of_each_token_is_the_same() -> None:
    """Long responses count as often as they have tokens (equation 16)."""
    bounds = offsets(torch.tensor([1, 3]))
    values = torch.full((4,), 0.1)
    others = torch.tensor([0.0, 0.0])
    returns = torch.tensor([0.1, 0.02])
    # (1 + 3 * 0.2) / 4 over tokens; 0.6 over responses. However small returns are.
    assert fitted(values, others, returns, bounds) == pytest.approx(0.4)


def test_a_step_moves_the_mixture_by_a_twentieth() -> None:
    assert tether.after_step(0.0, 1.0) == pytest.approx(0.05)
    assert tether.after_step(0.6, 0.2) == pytest.approx(0.58)
    rho = 0.0
    for _ in range(200):
        rho = tether.after_step(rho, 0.7)
    assert rho == pytest.approx(0.7, abs=1e-4)


def test_values_equal_to_the_mean_say_nothing() -> None:
    bounds = offsets(torch.tensor([2, 3]))
    zero = torch.zeros(5)
    sums = response_sums(zero[None], bounds)
    best = tether.best_mixture(sums, torch.tensor([1.0, 0.0]), torch.zeros(2))
    assert best is None
    assert tether.after_step(0.3, best) == 0.3


def test_the_ends_are_the_mean_and_the_value() -> None:
    bounds, _, others, values = step(2)
    assert torch.equal(tether.baseline(values, others, bounds, 1.0), values)
    group = to_tokens(others, bounds).float()
    assert torch.equal(tether.baseline(values, others, bounds, 0.0), group)


def gradient(lam: float, leak: bool = False) -> tuple[Tensor, Tensor]:
    """Exact expectation of A grad log pi over all pairs of responses of two binary tokens, and the
    gradient of E[R]. leak: B is the mean of the whole group."""
    logits = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64, requires_grad=True)
    states: dict[tuple[int, ...], int] = {(): 0, (0,): 1, (1,): 2}
    wrong = torch.tensor([0.9, -2.0, 0.5])
    responses = list(itertools.product((0, 1), repeat=2))
    rewards = dict(zip(responses, (0.2, -1.0, 0.7, 1.0), strict=True))

    def log_prob(y: tuple[int, ...]) -> Tensor:
        at = torch.stack([logits[states[y[:t]]] for t in range(len(y))])
        return torch.nn.functional.logsigmoid(torch.where(torch.tensor(y) == 1, at, -at))

    objective = torch.zeros((), dtype=torch.float64)
    surrogate = torch.zeros((), dtype=torch.float64)
    bounds = offsets(torch.tensor([2, 2]))
    for pair in itertools.product(responses, repeat=2):
        log_probs = torch.cat([log_prob(y) for y in pair])
        chance = log_probs.sum().exp()
        returns = torch.tensor([rewards[y] for y in pair])
        others = leave_one_out(returns, torch.zeros(2, dtype=torch.int64))
        others = returns.double().mean().expand(2) if leak else others
        values = wrong[torch.tensor([states[y[:t]] for y in pair for t in range(2)])]
        baseline = tether.baseline(values, others, bounds, 0.3)
        tokens = place_terminal(returns, bounds, 4)
        advantages = segmented_gae(tokens, baseline, bounds, lam)
        objective = objective + chance * returns.mean()
        surrogate = surrogate + chance.detach() * (advantages * log_probs).sum() / 2
    ours, true = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (surrogate, objective)
    )
    return ours, true


def test_with_lambda_1_the_gradient_is_unbiased() -> None:
    ours, true = gradient(1.0)
    torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("lam", "leak"), [(0.5, False), (1.0, True)])
def test_a_bias_is_noticed(lam: float, leak: bool) -> None:
    """Differences of wrong values where lambda is below 1; a mean that knows the own return."""
    ours, true = gradient(lam, leak)
    assert (ours - true).norm() > 0.02
