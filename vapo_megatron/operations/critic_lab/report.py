"""From continued responses and the critic's values to figures, and what they come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from vapo_megatron.algorithms.critic_conclusion import Conclusion, conclusion_of, described
from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, Reliability, figures_of, reliability
from vapo_megatron.algorithms.critic_probes import (
    Interval,
    Probes,
    figures,
    horizon_figures,
    lambda_returns,
    supported,
    with_intervals,
)
from vapo_megatron.algorithms.gae import length_adaptive_lambda, monte_carlo_returns
from vapo_megatron.config.algorithm import AdvantageConfig
from vapo_megatron.config.critic_probes import CriticProbesConfig
from vapo_megatron.operations.critic_lab.probe_rollouts import Drawn

LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

Row = tuple[float, dict[str, Interval]]


@dataclass(frozen=True)
class ProbeReport:
    """What probes say.

    Attributes:
        figures: of algorithms.critic_probes.figures, with their intervals.
        by_lambda, by_alpha: for a lambda, or a length-adaptive alpha, what horizon_figures says.
        best_lambda, best_alpha: the smallest that the critic supports; None: not one of those tried.
        bins: true values in bins of the critic's values.
        conclusion: what it comes to.
        reward: mean of the responses; truncated: share of the continuations that were cut.
        length: mean tokens of a response.
    """

    figures: dict[str, Interval]
    by_lambda: list[Row]
    by_alpha: list[Row]
    best_lambda: float | None
    best_alpha: float | None
    bins: Reliability
    conclusion: Conclusion
    reward: float
    truncated: float
    length: float

    @property
    def faults(self) -> list[str]:
        """Each with what it means."""
        return described(self.conclusion.faults)


def probed(drawn: Drawn, values: Tensor, advantage: AdvantageConfig, config: CriticProbesConfig) -> ProbeReport:
    """Everything about a critic's values [T] of continuations."""
    batch, k, gamma = drawn.batch, config.continuations, advantage.gamma
    bounds, starts = batch.response_cu_seqlens, batch.response_cu_seqlens[:-1]
    returns = monte_carlo_returns(batch.rewards, bounds, gamma)
    probes = Probes(
        values[starts].double().view(-1, k).mean(1),
        returns[starts].double().view(-1, k),
        drawn.siblings,
        drawn.prompts,
        drawn.positions,
        drawn.places,
    )

    def intervals(measure: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Interval]:
        return with_intervals(measure, probes.prompts, config.bootstrap, config.seed)

    def rows(choices: Sequence[float], lam: Callable[[float], float | Tensor]) -> list[Row]:
        found = []
        for choice in choices:
            returned = lambda_returns(batch.rewards, values, bounds, lam(choice), gamma).view(-1, k)
            found.append((choice, intervals(lambda w, x=returned: horizon_figures(x, probes.returns, w))))  # type: ignore[misc]
        return found

    floor = advantage.length_adaptive_floor
    by_lambda = rows(LAMBDAS, lambda lam: lam)
    by_alpha = rows(ALPHAS, lambda alpha: length_adaptive_lambda(drawn.lengths, alpha, floor))
    found = intervals(lambda w: figures(probes, w))
    every = Figures.read(figures_of(values, returns, bounds))
    # Continuations of a state are not independent, as the tests of the other faults want their responses.
    known = [f for f in value_faults(every, batch.group_ids, every.tokens > 0) if f in ("constant", "shift")]
    return ProbeReport(
        found,
        by_lambda,
        by_alpha,
        supported(by_lambda),
        supported(by_alpha),
        reliability(probes.values, probes.truth, bins=min(10, max(2, len(probes.values) // 20))),
        conclusion_of(found, known),
        float(drawn.responses.mean()),
        float(batch.truncated.float().mean()),
        float(drawn.lengths.float().mean()),
    )
