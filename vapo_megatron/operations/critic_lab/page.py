"""The page of `vapo-megatron critic`: Markdown for people, JSON for programs."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, Reliability, figures_of, reliability
from vapo_megatron.algorithms.critic_probes import (
    Conclusion,
    Interval,
    Probes,
    conclusion_of,
    described,
    figures,
    horizon_figures,
    lambda_returns,
    supported,
    with_intervals,
)
from vapo_megatron.algorithms.gae import length_adaptive_lambda, monte_carlo_returns
from vapo_megatron.config.algorithm import AdvantageConfig
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
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
        lines = []
        for choice in choices:
            returned = lambda_returns(batch.rewards, values, bounds, lam(choice), gamma).view(-1, k)
            lines.append((choice, intervals(lambda w, x=returned: horizon_figures(x, probes.returns, w))))  # type: ignore[misc]
        return lines

    floor = advantage.length_adaptive_floor
    by_lambda = rows(LAMBDAS, lambda lam: lam)
    by_alpha = rows(ALPHAS, lambda alpha: length_adaptive_lambda(drawn.lengths, alpha, floor))
    estimates = intervals(lambda w: figures(probes, w))
    every = Figures.read(figures_of(values, returns, bounds))
    # Continuations of a state are not independent, as the tests of the other faults want their responses.
    faults = [f for f in value_faults(every, batch.group_ids, every.tokens > 0) if f in ("constant", "shift")]
    return ProbeReport(
        estimates,
        by_lambda,
        by_alpha,
        supported(by_lambda),
        supported(by_alpha),
        reliability(probes.values, probes.truth, bins=min(10, max(2, len(probes.values) // 20))),
        conclusion_of(estimates, faults),
        float(drawn.responses.mean()),
        float(batch.truncated.float().mean()),
        float(drawn.lengths.float().mean()),
    )


# Figures in the order of the page, with what they are.
_ROWS = (
    ("correlation", "correlation of value and true value, the noise of the probes taken out"),
    ("calibration_slope", "slope of true value on value: 1 is right, below it values are too extreme"),
    ("calibration_intercept", "true value where the critic says 0"),
    ("bias", "mean of value less true value"),
    ("value_error", "root mean square of value less true value"),
    ("knowable", "share of the variance of returns that these states decide: the most that explained variance can be"),
    ("explained_critic", "of the variance of true values: the critic"),
    ("explained_group", "... the mean of the other responses to the prompt"),
    ("explained_position", "... a table by position"),
    ("gain", "the critic less the best of both (or of nothing)"),
)


def write_page(
    report: ProbeReport, facts: Mapping[str, object], config: ProbedRunConfig, folder: Path
) -> dict[str, Path]:
    """Write report.md and report.json into a folder; where they are."""
    places = {"page": folder / "report.md", "json": folder / "report.json"}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(places["page"]) as file:
        file.write("\n".join(_lines(report, facts, config)) + "\n")
    with atomic_write(places["json"]) as file:
        json.dump(_content(report, facts, config), file, indent=2)
    return places


def _lines(report: ProbeReport, facts: Mapping[str, object], config: ProbedRunConfig) -> Iterator[str]:
    yield f"# The critic of {config.run.name}, probed"
    yield ""
    yield f"**Conclusion: {report.conclusion.text}.**"
    yield ""
    yield from (f"- {reason}" for reason in report.conclusion.reasons)
    yield f"- smallest lambda that it supports: {_choice(report.best_lambda)}; smallest alpha of the length-adaptive "
    yield f"  lambda: {_choice(report.best_alpha)}"
    yield from (f"- FAULT {fault}" for fault in report.faults)
    yield ""
    yield "Brackets are 95 % bootstrap intervals over prompts. docs/critic.md says how to read this page."
    yield ""
    yield from _table(("", ""), [(name, str(fact)) for name, fact in facts.items()])
    yield from _table(
        ("responses", ""),
        [
            ("mean reward", f"{report.reward:.3f}"),
            ("mean tokens of a response", f"{report.length:.1f}"),
            ("continuations cut at sampling.max_new_tokens", f"{report.truncated:.1%}"),
        ],
    )
    yield from _table(
        ("figure", "[95 %]", "what it is"), [(f"`{key}`", str(report.figures[key]), meaning) for key, meaning in _ROWS]
    )
    yield "## Bias along the response"
    yield ""
    places = enumerate(config.critic_probes.quantiles)
    yield from _table(
        ("tokens before", "value less true value"),
        [(f"{quantile:.0%}", str(report.figures[f"bias_{place}"])) for place, quantile in places],
    )
    yield "## Calibration"
    yield ""
    bins = zip(report.bins.values.tolist(), report.bins.returns.tolist(), report.bins.tokens.tolist(), strict=True)
    yield from _table(
        ("mean value", "mean true value", "states"), [(f"{v:.3f}", f"{r:.3f}", str(n)) for v, r, n in bins]
    )
    yield "## Which horizon this critic supports"
    yield ""
    yield "`bias` is the systematic error of the lambda-return given the state, as a root mean square over states;"
    yield "`noise` is the standard deviation of one response's. A lambda is supported where bias is at most a quarter"
    yield "of noise: below it the critic's error decides, and no number of responses averages that out."
    yield ""
    for title, rows in (("lambda", report.by_lambda), ("alpha", report.by_alpha)):
        yield from _table((title, "bias", "mean bias", "noise"), [_horizon(row) for row in rows])


def _horizon(row: Row) -> tuple[str, ...]:
    choice, figures = row
    return f"{choice:g}", str(figures["bias_rms"]), str(figures["bias"]), str(figures["noise"])


def _choice(value: float | None) -> str:
    return "none of those tried" if value is None else f"{value:g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def _plain(interval: Interval) -> dict[str, float | None]:
    """NaN, a figure that is not defined, has no place in JSON."""
    return {name: None if math.isnan(x) else x for name, x in interval._asdict().items()}


def _content(report: ProbeReport, facts: Mapping[str, object], config: ProbedRunConfig) -> dict[str, Any]:
    def rows(title: str, found: Sequence[Row]) -> list[dict[str, Any]]:
        return [{title: choice} | {name: _plain(x) for name, x in row.items()} for choice, row in found]

    return {
        "facts": {name: str(fact) for name, fact in facts.items()},
        "probes": config.critic_probes.model_dump(mode="json"),
        "conclusion": report.conclusion._asdict() | {"text": report.conclusion.text},
        "figures": {name: _plain(interval) for name, interval in report.figures.items()},
        "by_lambda": rows("lambda", report.by_lambda),
        "by_alpha": rows("alpha", report.by_alpha),
        "best_lambda": report.best_lambda,
        "best_alpha": report.best_alpha,
        "reliability": {name: x.tolist() for name, x in report.bins._asdict().items()},
        "mean_reward": report.reward,
        "truncated": report.truncated,
        "mean_tokens": report.length,
    }
