"""The page of `vapo-megatron critic`: Markdown for people, JSON for programs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vapo_megatron.algorithms.critic_faults import value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, figures_of
from vapo_megatron.algorithms.critic_probes import (
    Conclusion,
    Interval,
    Probes,
    conclusion_of,
    described,
    figures,
    with_intervals,
)
from vapo_megatron.algorithms.gae import monte_carlo_returns
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.critic_probes import CriticProbesConfig, ProbedRunConfig
from vapo_megatron.operations.critic_lab.probe_rollouts import Drawn


class ProbeReport(NamedTuple):
    """What probes say: algorithms.critic_probes.figures with their intervals, what they come to, and figures of the
    responses: reward, tokens, share of continuations that were cut."""

    figures: dict[str, Interval]
    conclusion: Conclusion
    responses: dict[str, float]


def probed(drawn: Drawn, values: Tensor, gamma: float, config: CriticProbesConfig) -> ProbeReport:
    """Everything about a critic's values [T] of continuations."""
    batch, k = drawn.batch, config.continuations
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

    estimates = with_intervals(lambda w: figures(probes, w), probes.prompts, config.bootstrap, config.seed)
    every = Figures.read(figures_of(values, returns, bounds))
    # Continuations of a state are not independent, as the tests of the other faults want their responses.
    faults = [f for f in value_faults(every, batch.group_ids, every.tokens > 0) if f in ("constant", "shift")]
    return ProbeReport(
        estimates,
        conclusion_of(estimates, faults),
        {
            "mean reward": float(drawn.responses.mean()),
            "mean tokens of a response": float(drawn.lengths.float().mean()),
            "share of continuations cut at sampling.max_new_tokens": float(batch.truncated.float().mean()),
        },
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
    yield f"# The critic of {config.run.name}, probed\n"
    yield f"**Conclusion: {report.conclusion.text}.**\n"
    yield from (f"- {reason}" for reason in report.conclusion.reasons)
    yield from (f"- FAULT {fault}" for fault in described(report.conclusion.faults))
    yield "\nBrackets are 95 % bootstrap intervals over prompts. docs/critic.md says how to read this page.\n"
    responses = {name: f"{value:.3g}" for name, value in report.responses.items()}
    yield from _table(("", ""), [(name, str(fact)) for name, fact in (*facts.items(), *responses.items())])
    lines = [(f"`{key}`", str(report.figures[key]), meaning) for key, meaning in _ROWS]
    yield from _table(("figure", "[95 %]", "what it is"), lines)
    yield "## Bias along the response\n"
    places = enumerate(config.critic_probes.quantiles)
    biases = [(f"{quantile:.0%}", str(report.figures[f"bias_{place}"])) for place, quantile in places]
    yield from _table(("tokens before", "value less true value"), biases)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""


def _content(report: ProbeReport, facts: Mapping[str, object], config: ProbedRunConfig) -> dict[str, Any]:
    ends = {name: interval._asdict().items() for name, interval in report.figures.items()}
    return {
        "facts": {name: str(fact) for name, fact in facts.items()},
        "probes": config.critic_probes.model_dump(mode="json"),
        "conclusion": report.conclusion._asdict(),
        # NaN, a figure that is not defined, has no place in JSON.
        "figures": {name: {key: None if math.isnan(x) else x for key, x in row} for name, row in ends.items()},
        "responses": report.responses,
    }
