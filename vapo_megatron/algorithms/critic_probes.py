"""A critic compared with true values, which are estimated, with their error, by continuing
responses from a state.

P states (prefixes of responses) are each continued k times by the policy. The mean return of the
continuations estimates the state's value, and the variance of that noise is estimated too and
removed from every figure. float64 throughout. W is the number of weightings of the states, one for
each draw of a bootstrap.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import even_bins, means_of_other_groups, sums_by_group
from vapo_megatron.algorithms.critic_faults import FAULTS

_MOST_BINS = 32


class Probes(NamedTuple):
    """States and the returns of their continuations.

    Attributes:
        values: [P] the critic's values.
        returns: [P, k] of the continuations, k at least 2.
        siblings: [P] mean return of the other responses to the prompt, drawn apart from the
            continuations.
        prompts: int64 [P], the state's prompt, from 0 to the number of prompts less 1.
        positions: int64 [P], response tokens before the state.
        places: int64 [P], the number of the state's quantile of the response, from 0.
    """

    values: Tensor
    returns: Tensor
    siblings: Tensor
    prompts: Tensor
    positions: Tensor
    places: Tensor

    @property
    def truth(self) -> Tensor:
        """Unbiased estimate of each state's value, [P]."""
        return self.returns.double().mean(1)

    @property
    def noise(self) -> Tensor:
        """The variance of truth about the state's value [P], each entry without bias."""
        return self.returns.double().var(1) / self.returns.shape[1]


class Interval(NamedTuple):
    """A figure and its 95 % bootstrap interval over prompts."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def position_table(probes: Probes) -> Tensor:
    """The mean true value at about the same position, over the other prompts: [P]."""
    bins = max(1, min(_MOST_BINS, len(probes.values) // _MOST_BINS))
    prompts = int(probes.prompts.max()) + 1
    bin_of = even_bins(probes.positions, bins)
    sums = sums_by_group(probes.truth, bin_of, probes.prompts, bins, prompts)
    return means_of_other_groups(sums)[bin_of, probes.prompts]


class Moments:
    """Weighted moments over states, for each of W weightings [W, P]."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights.double()
        self._sums = self._weights.sum(1)

    def mean(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """Mean of x [P], of those `among` (bool [P]) alone where given: [W]; NaN of none."""
        if among is None:
            return self._weights @ x.double() / self._sums
        chosen = self._weights[:, among]
        return chosen @ x[among].double() / chosen.sum(1)

    def covariance(self, x: Tensor, y: Tensor) -> Tensor:
        """[W]."""
        x = x.double() - x.double().mean()
        y = y.double() - y.double().mean()
        return self.mean(x * y) - self.mean(x) * self.mean(y)


def explained(moments: Moments, predicted: Tensor, probes: Probes) -> Tensor:
    """1 - Var(V* - V) / Var(V*) of the true values V*, chance taken out of both variances: [W]."""
    truth = probes.truth
    chance = moments.mean(probes.noise)
    whole = moments.covariance(truth, truth) - chance
    left = moments.covariance(truth - predicted, truth - predicted) - chance
    return torch.where(whole > 0, 1 - left / whole, torch.nan)


def figures(probes: Probes, weights: Tensor) -> dict[str, Tensor]:
    """All figures of the critic under each weighting [W, P]: by name, [W].

    explained_*: of the variance of true values. knowable: Var(V*) / Var(R), the most that explained
    variance of returns can be. correlation and calibration are with the true value, with the noise
    of the probes removed.
    """
    moments = Moments(weights)
    truth = probes.truth
    values = probes.values.double()
    chance = moments.mean(probes.noise)
    whole = moments.covariance(truth, truth) - chance
    spread = moments.covariance(values, values)
    covariance = moments.covariance(values, truth)
    varies = spread > 1e-14 * moments.mean(values.square())
    slope = torch.where(varies, covariance / spread, 0)
    returns = moments.mean(probes.returns.double().square().mean(1)) - moments.mean(truth).square()
    named = {
        "knowable": torch.where(returns > 0, whole / returns, 0),
        "correlation": torch.where(
            varies & (whole > 0), covariance / (spread * whole).clamp(min=1e-30).sqrt(), 0
        ),
        "calibration_slope": slope,
        "calibration_intercept": moments.mean(truth) - slope * moments.mean(values),
        "bias": moments.mean(values - truth),
        "value_error": (moments.mean((values - truth).square()) - chance).clamp(min=0).sqrt(),
        "explained_critic": explained(moments, values, probes),
        "explained_group": explained(moments, probes.siblings, probes),
        "explained_position": explained(moments, position_table(probes), probes),
    }
    free = torch.maximum(named["explained_group"], named["explained_position"]).clamp(min=0)
    named["gain"] = named["explained_critic"] - free
    for place in range(int(probes.places.max()) + 1):
        named[f"bias_{place}"] = moments.mean(values - truth, among=probes.places == place)
    return named


def bootstrap_weights(prompts: Tensor, draws: int, seed: int) -> Tensor:
    """How often each state occurs in each draw of as many prompts as there are, with replacement:
    int64 [draws, P]."""
    count = int(prompts.max()) + 1
    drawn = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
    times = torch.zeros(draws, count, dtype=torch.int64).scatter_add_(
        1, drawn, torch.ones_like(drawn)
    )
    return times[:, prompts]


def with_intervals(
    measure: Callable[[Tensor], dict[str, Tensor]], prompts: Tensor, draws: int, seed: int
) -> dict[str, Interval]:
    """Figures of states with equal weights, and between which ends 95 % of the draws of prompts
    have them.

    Args:
        measure: from weights [W, P] to figures [W] by name.
        prompts: int64 [P].
        draws: of the bootstrap.
        seed: of the draws.
    """
    estimates = measure(torch.ones(1, len(prompts)))
    drawn = measure(bootstrap_weights(prompts, draws, seed))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return {
        name: Interval(float(estimates[name]), *torch.nanquantile(drawn[name], ends).tolist())
        for name in estimates
    }


Choice = Literal["critic", "group", "nothing", "undecided"]

MEANING: dict[Choice, str] = {
    "critic": "keep the critic: it knows more of the true values than the free baselines do",
    "group": (
        "use a group baseline (grpo, rloo): the mean of the other responses, or a table by "
        "position, knows as much or more, and is free"
    ),
    "nothing": (
        "no state is better than another beyond chance: there is nothing for a critic to know here"
    ),
    "undecided": (
        "undecided with this many probes: raise critic_probes.prompts; until then a group baseline "
        "is free"
    ),
}

# Values that order states at least so well, and are too large or too small, are scaled by
# something.
_ORDERS = 0.7
_WITHIN = (0.8, 1.25)
# A gain smaller than this is not worth a second model's help.
_WORTH = 0.02


class Conclusion(NamedTuple):
    """choice: what to use, text: in words; reasons: the figures that it rests on; faults: names in
    FAULTS."""

    choice: Choice
    text: str
    reasons: list[str]
    faults: list[str]


def conclusion_of(figures: Mapping[str, Interval], faults: Sequence[str]) -> Conclusion:
    """The conclusion on critic_probes.figures and on the faults that are known already."""
    knowable = figures["knowable"]
    gain = figures["gain"]
    reasons = [
        f"of the variance of returns {knowable} can be known at these states",
        f"of the variance of true values the critic explains {figures['explained_critic']}, the "
        f"mean of the other responses {figures['explained_group']}, the position "
        f"{figures['explained_position']}",
        f"gain of the critic over the best of them {gain}",
    ]
    choice: Choice = "undecided"
    if knowable.low <= 0:
        if knowable.high < 0.05:
            choice = "nothing"
        else:
            choice = "undecided"
    elif gain.low > 0:
        choice = "critic"
    elif (
        gain.high < 0
        or -_WORTH < gain.low <= gain.high < _WORTH
        or figures["explained_critic"].high <= 0
    ):
        choice = "group"
    faults = [*faults, *(name for name in _probed(figures) if name not in faults)]
    return Conclusion(choice, MEANING[choice], reasons, faults)


def _probed(figures: Mapping[str, Interval]) -> Iterator[str]:
    slope = figures["calibration_slope"]
    correlation = figures["correlation"]
    if slope.high < 0 and correlation.high < 0:
        yield "sign"
    elif correlation.low > _ORDERS and (slope.high < _WITHIN[0] or slope.low > _WITHIN[1]):
        yield "temperature"


def described(faults: Sequence[str]) -> list[str]:
    """Each fault with its meaning."""
    return [f"{name}: {FAULTS[name]}" for name in faults]
