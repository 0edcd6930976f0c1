"""Tables of the transformer ablation, from measured/transformer.json."""

import math
from statistics import mean
from typing import Any

from examples.ablation.intervals import interval, paired, shown
from examples.ablation.results import Figures, finals, known, mean_over_steps, reached

THRESHOLDS = (0.85, 0.9)


def finished(figures: Figures) -> bool:
    """Whether any row of any setting has a finished seed."""
    return any(row["seeds"] for setting in figures["settings"].values() for row in setting["rows"].values())


def missing(figures: Figures) -> list[str]:
    """setting: row, seeds that are neither finished nor refused."""
    lines = []
    for name, setting in figures["settings"].items():
        for row in setting["rows"].values():
            lacking = [s for s in map(str, figures["seeds"]) if s not in row["seeds"] and s not in row["refused"]]
            if lacking:
                lines.append(f"{name}, {row['title']}: seeds {', '.join(lacking)}")
    return lines


def refused(setting: Figures) -> list[str]:
    """Rows that were not run, and why."""
    return [
        f"{row['title']}, seed {seed}: {reason}"
        for row in setting["rows"].values()
        for seed, reason in row["refused"].items()
    ]


def critic_table(setting: Figures) -> str:
    """Of each seed what value pretraining left, on prompts it has not seen, before the policy moved."""
    titles = ("seed", "accuracy of the cold start", "explained variance", "leave-one-out", "by position")
    lines = [f"| {' | '.join((*titles, 'largest bias', 'updates'))} |", "|---:|---:|---:|---:|---:|---:|---:|"]
    for seed, critic in setting["critics"].items():
        explained = (critic[key] for key in ("explained_variance", "baseline_loo_ev", "baseline_position_ev"))
        cells = [seed, f"{critic['accuracy']:.3f}", *("–" if x is None else f"{x:.3f}" for x in explained)]
        cells += [f"{critic['largest_bias']:.2f}", f"{critic['updates']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(setting: Figures) -> str:
    """Final accuracy and mean over the course, with VAPO's lead paired by seed, and what went on meanwhile."""
    titles = ["", "paper, AIME24", "seeds", "final", "mean of all evaluations", "VAPO less this, final"]
    titles += ["VAPO less this, mean", "tokens", "lambda", "clipped low, high", "explained variance"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    vapo = setting["rows"]["vapo"]
    for name, row in setting["rows"].items():
        if not row["seeds"]:
            continue
        compared = name != "vapo"
        seeds = list(row["seeds"].values())
        cells = [row["title"], "" if row["paper"] is None else f"{row['paper']:g}", str(len(seeds))]
        cells += [spread(list(found(row).values())) for found in (finals, mean_over_steps)]
        cells += [shown(paired(found(vapo), found(row))) if compared else "" for found in (finals, mean_over_steps)]
        cells += [course(seeds, "length", ".0f"), course(seeds, "lambda", ".2f")]
        clipped = [100 * mean(mean(known(s[side])) for s in seeds) for side in ("clip_low", "clip_high")]
        cells += [f"{clipped[0]:.2f} %, {clipped[1]:.2f} %", course(seeds, "explained", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(setting: Figures) -> str:
    """Responses, value pretraining's counted, until an evaluation first reaches each threshold."""
    lines = ["| | " + " | ".join(f"responses to {t:g}" for t in THRESHOLDS) + " |", "|---|" + "---:|" * len(THRESHOLDS)]
    for row in setting["rows"].values():
        if row["seeds"]:
            cells = [_until(setting, row, threshold, "responses") for threshold in THRESHOLDS]
            lines.append(f"| {row['title']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _until(setting: Figures, row: Figures, threshold: float, by: str) -> str:
    starts = {seed: critic["accuracy"] for seed, critic in setting["critics"].items()}
    found = [reached(figures, starts[seed], threshold, by) for seed, figures in row["seeds"].items()]
    there = known(found)
    if not there:
        return "not reached"
    return f"{mean(there):.0f}" + ("" if len(there) == len(found) else f" ({len(there)} of {len(found)} seeds)")


def spread(values: list[float]) -> str:
    """Mean with its 95 % interval; of one value, the value."""
    found = interval(values)
    return f"{found.mean:.3f}" + ("" if math.isnan(found.half) else f" ± {found.half:.3f}")


def course(seeds: list[dict[str, Any]], name: str, form: str) -> str:
    """First -> last value of a metric, mean over seeds; empty where there is none."""
    values = [known(found[name]) for found in seeds if name in found]
    if not values or not all(values):
        return ""
    return f"{mean(v[0] for v in values):{form}} → {mean(v[-1] for v in values):{form}}"
