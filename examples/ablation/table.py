"""From metrics.jsonl of all runs to the table: what each row reached at each seed, and how far that is from VAPO."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from ablation_config import AblationConfig, Row
from plan import EVALUATION
from reward_decay import Course, summary

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.metrics import read_metrics

# An accuracy from 640 responses has a standard error of 0.02 at most: nothing below that is called an effect.
MARGIN = 0.02
PARTS = {
    "ablation": "VAPO's ablation (table 1 of arXiv 2504.05118)",
    "family": "The family",
    "collapse": "When PPO collapses, and when not",
}

Effect = Literal["shown", "reversed", "not resolved", "one seed"]


@dataclass(frozen=True)
class SeedResult:
    """A finished run: accuracy on unseen problems by step, and of each step's rollout the mean length in tokens.

    value_bias is mean V - R by percent of the response, in the first step; empty without a critic.
    """

    accuracy: dict[int, float]
    length: list[float]
    value_bias: dict[int, float]

    @property
    def first(self) -> float:
        """Accuracy at the first evaluation."""
        return self.accuracy[min(self.accuracy)]

    @property
    def final(self) -> float:
        """Accuracy after the last step."""
        return self.accuracy[max(self.accuracy)]


@dataclass(frozen=True)
class RowResult:
    """A row of the table with its finished seeds."""

    row: Row
    seeds: dict[int, SeedResult]

    @property
    def finals(self) -> list[float]:
        """Final accuracy at each seed."""
        return [result.final for result in self.seeds.values()]

    @property
    def last_lengths(self) -> list[float]:
        """Mean response length of the last step, at each seed."""
        return [result.length[-1] for result in self.seeds.values()]


@dataclass(frozen=True)
class Table:
    """Rows that have at least one finished seed; start is the accuracy of each seed's cold start."""

    steps: int
    seeds: tuple[int, ...]
    start: dict[int, float]
    rows: tuple[RowResult, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> RowResult | None:
        """The row of a name."""
        return next((result for result in self.rows if result.row.name == name), None)

    def differences(self, result: RowResult) -> list[float]:
        """VAPO's final accuracy less that of a row, seed by seed, where both are finished."""
        vapo = self.of("vapo")
        shared = [seed for seed in result.seeds if vapo is not None and seed in vapo.seeds]
        return [vapo.seeds[seed].final - result.seeds[seed].final for seed in shared] if vapo else []

    def effect(self, result: RowResult) -> Effect:
        """Whether leaving a part out makes VAPO worse, as in the paper: at every seed, and by MARGIN on average."""
        found = self.differences(result)
        if len(found) < 2:
            return "one seed"
        if min(found) > 0 and mean(found) >= MARGIN:
            return "shown"
        if max(found) < 0 and mean(found) <= -MARGIN:
            return "reversed"
        return "not resolved"


def make_table(config: AblationConfig, out: Path, finished: set[str]) -> Table:
    """Read the finished runs (names of jobs: seed1/vapo)."""
    rows, start = [], {}
    for seed in config.seeds:
        if f"seed{seed}/value_critic" in finished:
            before = {
                row["step"]: row for row in read_metrics(out / f"seed{seed}" / "value_critic") if EVALUATION in row
            }
            start[seed] = before[0][EVALUATION]
    for row in config.rows:
        done = [seed for seed in config.seeds if f"seed{seed}/{row.name}" in finished]
        if done:
            rows.append(RowResult(row, {seed: read_seed(out / f"seed{seed}" / row.name) for seed in done}))
    return Table(config.steps, config.seeds, start, tuple(rows), environment_facts())


def read_seed(run_dir: Path) -> SeedResult:
    """The metrics of a finished run."""
    steps = [row for row in read_metrics(run_dir) if row["step"] > 0]
    bias = {position: steps[0].get(f"{names.VALUE_BIAS}{position}") for position in names.BIAS_POSITIONS}
    return SeedResult(
        accuracy={row["step"]: row[EVALUATION] for row in steps if EVALUATION in row},
        length=[row[names.LENGTH] for row in steps],
        value_bias={position: value for position, value in bias.items() if value is not None},
    )


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean ± sample standard deviation; of one value, the value."""
    if not values:
        return "–"
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def markdown(table: Table) -> str:
    """The table, a section for each part."""
    lines = [f"Cold start: accuracy {spread(list(table.start.values()))} (seeds {', '.join(map(str, table.start))})."]
    for part, title in PARTS.items():
        chosen = [result for result in table.rows if result.row.part == part]
        if not chosen:
            continue
        lines += ["", f"**{title}**", ""]
        first = f"after {min(min(found.accuracy) for found in chosen[0].seeds.values())} steps"
        titles = ("", "paper, AIME24", first, f"after {table.steps}", "least to most", "VAPO less this", "effect")
        lines += [f"| {' | '.join((*titles, 'tokens at the end'))} |", "|---|---:|---:|---:|---:|---:|---|---:|"]
        lines += [_line(table, result) for result in chosen]
    return "\n".join(lines)


def _line(table: Table, result: RowResult) -> str:
    row, finals, away = result.row, result.finals, table.differences(result)
    compared = row.name != "vapo" and bool(away)
    seeds = "" if len(finals) == len(table.seeds) else f" ({len(finals)} of {len(table.seeds)} seeds)"
    cells = (
        row.title + seeds,
        f"{row.paper:g}" if row.paper is not None else "",
        spread([found.first for found in result.seeds.values()]),
        spread(finals),
        f"{min(finals):.3f} to {max(finals):.3f}",
        spread(away, "+.3f").replace("± +", "± ") if compared else "",
        table.effect(result) if compared and row.part == "ablation" else "",
        spread(result.last_lengths, ".1f"),
    )
    return f"| {' | '.join(cells)} |"


def write_table(table: Table, decay: Sequence[Course], out: Path) -> None:
    """table.md and table.json, the second with every number that table and metrics are made of."""
    rows = [
        {
            "row": result.row.model_dump(mode="json"),
            "accuracy": {"mean": mean(result.finals), "least": min(result.finals), "most": max(result.finals)},
            "vapo_less_this": table.differences(result),
            "effect": table.effect(result),
            "seeds": {seed: asdict(found) for seed, found in result.seeds.items()},
        }
        for result in table.rows
    ]
    whole = {"steps": table.steps, "start": table.start, "rows": rows, "decay": summary(decay), "facts": table.facts}
    with atomic_write(out / "table.json") as file:
        json.dump(whole, file, indent=1)
    with atomic_write(out / "table.md") as file:
        file.write(markdown(table) + "\n")
