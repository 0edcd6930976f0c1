"""Values by regression: the bias of the gradient by enumeration, leaks, noise, and trust."""

import itertools

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration, regression
from vapo_megatron.algorithms.baselines import siblings_mean
from vapo_megatron.algorithms.calibration import BINS, Fit, Moments
from vapo_megatron.algorithms.prefix_features import entropy, surprise
from vapo_megatron.algorithms.prefix_tree import prefix_hashes, prefix_values
from vapo_megatron.algorithms.regression import Regressors
from vapo_megatron.algorithms.segments import place_terminal, to_tokens
from vapo_megatron.data.batch import offsets

FEATURES = ("prefix", "surprise", "entropy", "siblings", "history")
ENDINGS = [
    y for n in (2, 3) for y in itertools.product((0, 1), repeat=n) if (y[1] == 1) == (n == 2)
]
REWARDS = dict(zip(ENDINGS, (0.2, -1.0, 0.7, 1.0, -0.3, 0.5), strict=True))


def features_of(
    tokens: Tensor, bounds: Tensor, returns: Tensor, logprobs: Tensor, leak: str
) -> Regressors:
    """All features of one group. leak: the feature that sees more than it may."""
    group = torch.zeros(len(returns), dtype=torch.int64)
    known = torch.ones(len(returns), dtype=torch.bool)
    siblings = siblings_mean(returns, group)
    included = returns.double() if leak == "siblings" else siblings
    tree = prefix_values(prefix_hashes(tokens, bounds), bounds, group, returns, known, siblings)
    surprises = surprise(logprobs, bounds)
    if leak == "prefix":
        tree = tree._replace(values=tree.values + to_tokens(returns.double(), bounds))
    if leak == "surprise":
        surprises = surprises + logprobs
    if leak == "length":
        included = included + bounds.diff()
    by_token = {
        "prefix": tree.values,
        "surprise": surprises,
        "entropy": entropy(-logprobs, bounds),
    }
    by_response = {"siblings": included, "history": torch.full((len(returns),), 0.3)}
    return Regressors.join(by_token, by_response, len(tokens), len(returns))


def gradient(
    group: int, trust: float, lam: float, features: tuple[str, ...], leak: str = ""
) -> tuple[Tensor, Tensor]:
    """Exact expectation of A grad log pi over all groups of responses of a small MDP, and the
    gradient of E[R].

    Three binary tokens; a 1 as second token ends the response. The log-probs that are read are not
    the policy's.
    """
    chance_of = torch.Generator().manual_seed(5)
    logits = torch.tensor([0.3, -0.4, 0.8, 0.1, -0.7], dtype=torch.float64, requires_grad=True)
    states = {(): 0, (0,): 1, (1,): 2, (0, 0): 3, (1, 0): 4}
    read = -3 * torch.rand(len(states), 2, dtype=torch.float64, generator=chance_of)
    columns = ("prefix", *("surprise",) * 3, *("entropy",) * 2, "siblings", "history")
    bins = torch.randn(BINS, 1 + len(columns), dtype=torch.float64, generator=chance_of)
    bins[:, 1:] *= torch.tensor([name in features for name in columns])
    past = Fit(bins, bins[0], bins[0])

    def visited(y: tuple[int, ...]) -> list[int]:
        return [states[y[:t]] for t in range(len(y))]

    def log_prob(y: tuple[int, ...]) -> Tensor:
        at = logits[visited(y)]
        return torch.nn.functional.logsigmoid(torch.where(torch.tensor(y) == 1, at, -at))

    objective = torch.zeros((), dtype=torch.float64)
    surrogate = torch.zeros((), dtype=torch.float64)
    for ys in itertools.product(ENDINGS, repeat=group):
        probability = torch.stack([log_prob(y).sum() for y in ys]).sum().exp()
        returns = torch.tensor([REWARDS[y] for y in ys])
        bounds = offsets(torch.tensor([len(y) for y in ys]))
        tokens = torch.tensor([token for y in ys for token in y], dtype=torch.int32)
        logprobs = read[[state for y in ys for state in visited(y)], tokens.long()]
        regressors = features_of(tokens, bounds, returns, logprobs, leak)
        baseline = regression.predicted(regressors, bounds, past).float()
        advantages = calibration.trusted_advantages(
            place_terminal(returns, bounds, len(tokens)),
            baseline,
            bounds,
            torch.full((group,), lam),
            trust,
        )
        objective = objective + probability * returns.mean()
        log_probs = torch.cat([log_prob(y) for y in ys])
        surrogate = surrogate + probability.detach() * (advantages * log_probs).sum() / group
    ours, true = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (surrogate, objective)
    )
    return ours, true


@pytest.mark.parametrize(("trust", "lam"), [(0.0, 0.5), (0.6, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_without_trust_or_at_lambda_1_no_feature_adds_bias(
    group: int, trust: float, lam: float
) -> None:
    """Whatever the log-probs and the coefficients are."""
    ours, true = gradient(group, trust, lam, FEATURES)
    torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("feature", "leak"),
    [
        ("siblings", "siblings"),
        ("prefix", "prefix"),
        ("surprise", "surprise"),
        ("siblings", "length"),
    ],
)
def test_a_feature_that_knows_too_much_biases_the_gradient(feature: str, leak: str) -> None:
    """The response's own return among its siblings', the log-prob of the token itself, the length
    of the response."""
    ours, true = gradient(2, 0.0, 1.0, (feature,), leak)
    assert (ours - true).norm() > 0.05
    ours, true = gradient(2, 0.0, 1.0, (feature,))
    assert (ours - true).norm() < 1e-6, "the same feature without the leak"


def step(seed: int, noise: int) -> tuple[Regressors, Tensor, Tensor]:
    """128 responses in groups of 8, a feature that knows half of the return, and columns of
    noise."""
    chance = torch.Generator().manual_seed(seed)
    bounds = offsets(torch.randint(1, 60, (128,), generator=chance))
    tokens = int(bounds[-1])
    returns = torch.randn(128, generator=chance).sign()
    knows = to_tokens(returns, bounds) + 2 * torch.randn(tokens, generator=chance)
    groups = torch.arange(128) // 8
    # As sums over a prefix are: a random walk in the response, far from 0.
    steps = torch.randn(noise, tokens, generator=chance).cumsum(1)
    by_token = {"value": knows, "surprise": 0.2 * steps}
    by_response = {"siblings": siblings_mean(returns, groups)}
    return Regressors.join(by_token, by_response, tokens, 128), bounds, returns


def explained(noise: int) -> float:
    """Mean explained variance of steps 11 to 30 with coefficients of the steps before."""
    past: Moments | None = None
    shares = []
    for seed in range(30):
        regressors, bounds, returns = step(seed, noise)
        sums = calibration.response_sums(regressors.by_token, bounds)
        if past is not None and seed >= 10:
            fit = regression.fitted(past, regressors.names, by_position=True)
            errors = to_tokens(returns, bounds) - regression.predicted(regressors, bounds, fit)
            shares.append(1 - float(errors.var() / to_tokens(returns, bounds).var()))
        moments = calibration.moments(sums, returns, regressors.by_response)
        past = moments if past is None else past.followed_by(moments)
    return sum(shares) / len(shares)


def test_features_of_noise_cost_less_than_a_hundredth() -> None:
    without = explained(0)
    assert without > 0.15
    assert explained(3) > without - 0.01


def test_the_leading_coefficient_is_that_of_a_return() -> None:
    names = ("prefix", "surprise", "surprise", "siblings", "history")
    assert regression.prior_of(names, 0.4).tolist() == [0, 0, 0, 0, 1, 0]
    assert regression.prior_of(names[:3], 0.4).tolist() == [0, 1, 0, 0]
    assert regression.prior_of(("surprise", "history"), 0.4).tolist() == [0, 0, 1]
    assert regression.prior_of(("surprise", "value"), 0.4).tolist() == [0.4, 0, 0]


def predictions(slope: float, steps: int = 3) -> Moments:
    """Moments of returns that are slope times the prediction, and noise."""
    chance = torch.Generator().manual_seed(2)
    past: Moments | None = None
    for _ in range(steps):
        bounds = offsets(torch.randint(1, 60, (256,), generator=chance))
        values = torch.randn(int(bounds[-1]), generator=chance)
        first = values[bounds[:-1]]
        returns = slope * first + torch.randn(256, generator=chance)
        values = to_tokens(first, bounds)
        sums = calibration.response_sums(values[None], bounds)
        moments = calibration.moments(sums, returns, torch.zeros(0, 256))
        past = moments if past is None else past.followed_by(moments)
    assert past is not None
    return past


def test_trust_is_twice_the_slope_of_returns_on_past_predictions() -> None:
    assert regression.trust(None) == 0, "nothing was predicted yet"
    assert regression.trust(predictions(1.0)) == 1
    assert regression.trust(predictions(0.25)) == pytest.approx(0.5, abs=0.15)
    assert regression.trust(predictions(0.0)) < 0.12
    assert regression.trust(predictions(-1.0)) == 0


def test_shares_of_features_add_up_to_what_values_explain() -> None:
    regressors, bounds, returns = step(1, 2)
    sums = calibration.response_sums(regressors.by_token, bounds)
    past = calibration.moments(sums, returns, regressors.by_response)
    fit = regression.fitted(past, regressors.names, by_position=True)
    lengths = bounds.diff()
    shares = {
        name: float(regression.share_of_variance(added, lengths, returns))
        for name, added in regression.contributions(regressors, bounds, fit).items()
    }
    assert list(shares) == ["position", "value", "surprise", "siblings"]
    r = to_tokens(returns, bounds).double()
    values = regression.predicted(regressors, bounds, fit)
    covariance = ((values - values.mean()) * (r - r.mean())).mean()
    assert sum(shares.values()) == pytest.approx(float(covariance / r.var(unbiased=False)))
    assert shares["value"] > 0.1 > shares["surprise"]
    none = regression.share_of_variance(torch.ones(2), torch.ones(2), torch.ones(2))
    assert float(none) == 0


def test_without_position_all_bins_have_one_set_of_coefficients() -> None:
    regressors, bounds, returns = step(1, 2)
    sums = calibration.response_sums(regressors.by_token, bounds)
    past = calibration.moments(sums, returns, regressors.by_response)
    by_bin, pooled = (
        regression.fitted(past, regressors.names, by_position) for by_position in (True, False)
    )
    assert torch.equal(pooled.bins, pooled.bins[:1].expand_as(pooled.bins))
    assert not torch.equal(by_bin.bins[0], by_bin.bins[4])
    # The last bin was reached by nobody.
    torch.testing.assert_close(pooled.bins[-1], by_bin.bins[-1])


def test_a_feature_of_several_columns_counts_as_one() -> None:
    by_token = {"surprise": torch.arange(6.0).view(3, 2), "value": torch.tensor([7.0, 8.0])}
    regressors = Regressors.join(by_token, {"history": torch.tensor([3.0])}, 2, 1)
    assert regressors.names == ("surprise",) * 3 + ("value", "history")
    assert regressors.by_token.tolist() == [[0, 1], [2, 3], [4, 5], [7, 8]]
    assert regressors.by_response.tolist() == [[3]]
