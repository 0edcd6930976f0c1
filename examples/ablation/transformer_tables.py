"""Tables of the transformer ablation, from measured/transformer.json."""

import math
from statistics import mean
from typing import Any

from examples.ablation.intervals import interval, paired, shown
from examples.ablation.results import (
    Figures,
    accuracy_at,
    finals,
    known,
    mean_of_rollouts,
    mean_over_steps,
    reached,
)

MEASURES = {"final": finals, "evaluations": mean_over_steps, "rollouts": mean_of_rollouts}
THRESHOLDS = (0.5, 0.6, 0.7, 0.85)
LENGTHS = ((min, "length_min"), (max, "length_max"))
FEWEST_SEEDS = 3
OTHERS = ("ppo", "vc_ppo", "grpo", "dapo")
SHARES = (0.25, 0.5, 0.75, 1.0)  # of what VAPO spent


def finished(figures: Figures) -> bool:
    """Whether any row of any setting has a finished seed."""
    return any(
        row["seeds"] for setting in figures["settings"].values() for row in setting["rows"].values()
    )


def missing(figures: Figures) -> list[str]:
    """setting: row, seeds that are neither finished nor refused."""
    lines = []
    for name, setting in figures["settings"].items():
        for row in setting["rows"].values():
            lacking = [
                s
                for s in map(str, figures["seeds"])
                if s not in row["seeds"] and s not in row["refused"]
            ]
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
    """Of each seed what value pretraining left, on prompts it has not seen, before the policy
    moved."""
    titles = (
        "seed",
        "accuracy of the cold start",
        "explained variance",
        "leave-one-out",
        "by position",
    )
    lines = [
        f"| {' | '.join((*titles, 'largest bias', 'updates'))} |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, critic in setting["critics"].items():
        explained = (
            critic[key] for key in ("explained_variance", "baseline_loo_ev", "baseline_position_ev")
        )
        cells = [
            seed,
            f"{critic['accuracy']:.3f}",
            *("–" if x is None else f"{x:.3f}" for x in explained),
        ]
        cells += [f"{critic['largest_bias']:.2f}", f"{critic['updates']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(setting: Figures, steps: int) -> str:
    """Final accuracy and mean over the course, with VAPO's lead paired by seed, and what went on
    meanwhile.

    steps: of VAPO, after which rows are compared; a row may have more of them.
    """
    titles = [
        "",
        "paper, AIME24",
        "seeds",
        *MEASURES,
        *(f"VAPO less this, {name}" for name in MEASURES),
        "tokens",
    ]
    titles += ["lambda", "clipped low, high", "explained variance", "of leave-one-out"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    vapo, measures = setting["rows"]["vapo"], MEASURES.values()
    for name, row in setting["rows"].items():
        if not row["seeds"]:
            continue
        compared = name != "vapo"
        seeds = list(row["seeds"].values())
        cells = [row["title"], "" if row["paper"] is None else f"{row['paper']:g}", str(len(seeds))]
        cells += [spread(list(found(row, steps).values())) for found in measures]
        cells += [
            shown(paired(found(vapo, steps), found(row, steps))) if compared else ""
            for found in measures
        ]
        cells += [
            course(seeds, each, form, steps)
            for each, form in (("length", ".0f"), ("lambda", ".2f"))
        ]
        clipped = [
            100 * mean(mean(known(s[side][:steps])) for s in seeds)
            for side in ("clip_low", "clip_high")
        ]
        cells += [f"{clipped[0]:.2f} %, {clipped[1]:.2f} %"]
        cells += [course(seeds, each, ".2f", steps) for each in ("explained", "baseline_loo")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pretraining_responses(setting: Figures) -> int:
    """That a seed's value pretraining drew."""
    return next(critic["responses"] for critic in setting["critics"].values())


def findings(setting: Figures, steps: int) -> list[str]:
    """Of each part of VAPO whether leaving it out showed; if not, beside it the figures that it
    acts through."""
    lines = []
    vapo = setting["rows"]["vapo"]
    for row in (
        row
        for row in setting["rows"].values()
        if row["title"].startswith("without") and row["seeds"]
    ):
        less = [paired(found(vapo, steps), found(row, steps)) for found in MEASURES.values()]
        ahead, behind = (
            any(each and each.excludes_zero and each.mean * sign > 0 for each in less)
            for sign in (1, -1)
        )
        told = sum(seed in vapo["seeds"] for seed in row["seeds"]) >= FEWEST_SEEDS
        word = (
            "shown"
            if ahead
            else "not shown"
            if told
            else f"fewer than {FEWEST_SEEDS} seeds, which tell nothing"
        )
        word += (
            ", and reversed in one measure"
            if ahead and behind
            else ", and reversed"
            if behind
            else ""
        )
        lines.append(
            f"{row['title']}: {word}" + ("" if ahead else f"; {_acts_through(vapo, row, steps)}")
        )
    return lines


def against_others(setting: Figures, steps: int) -> list[str]:
    """Of each other algorithm in which measures VAPO is ahead of it or behind, by more than the
    interval."""
    lines, vapo = [], setting["rows"]["vapo"]
    for row in (
        row for row in setting["rows"].values() if row["preset"] in OTHERS and row["seeds"]
    ):
        less = {
            name: paired(found(vapo, steps), found(row, steps)) for name, found in MEASURES.items()
        }
        told = {name: each.mean for name, each in less.items() if each and each.excludes_zero}
        ahead = ", ".join(name for name, by in told.items() if by > 0) or "none"
        behind = ", ".join(name for name, by in told.items() if by < 0) or "none"
        lines.append(
            f"{row['title']}: after equally many steps VAPO is ahead in {ahead}, behind in {behind}"
        )
    return lines


def _acts_through(vapo: Figures, row: Figures, steps: int) -> str:
    """What is known of the mechanism that a row leaves out, of VAPO and of the row."""
    both = [list(each["seeds"].values()) for each in (vapo, row)]
    clipped = [
        100 * mean(mean(known(found["clip_high"][:steps])) for found in seeds) for seeds in both
    ]
    shortest, longest = (
        mean(pick(known(f[name][:steps])) for f in both[0]) for pick, name in LENGTHS
    )
    explained = [course(seeds, "explained", ".2f", steps) for seeds in both]
    facts = {
        "without_value_pretraining": f"explained variance {explained[1]}, VAPO's {explained[0]}",
        "without_decoupled_gae": f"explained variance {explained[1]}, VAPO's {explained[0]}",
        "without_length_adaptive_gae": f"VAPO's lambda {course(both[0], 'lambda', '.2f', steps)}",
        "without_clip_higher": (
            f"clipped high {clipped[1]:.3f} % of tokens, VAPO's {clipped[0]:.3f} %"
        ),
        "without_token_level_loss": f"responses of {shortest:.0f} to {longest:.0f} tokens",
        "without_positive_nll": (
            f"correct responses in a rollout {course(both[0], 'correct', '.2f', steps)}"
        ),
        "without_group_sampling": (
            "explained variance of the mean of the other responses of the group "
            f"{course(both[0], 'baseline_loo', '.2f', steps)}, the critic's {explained[0]}, "
            f"{explained[1]} without groups"
        ),
    }
    return facts[row["name"]]


def equal_table(setting: Figures, by: str) -> str:
    """Accuracy of VAPO and of the rows without value pretraining when both have spent as much.

    by: "responses", drawn, or "cpu_seconds"; those of value pretraining are counted.
    """
    vapo = setting["rows"]["vapo"]
    rows = [
        row for row in setting["rows"].values() if row["critic"] != "pretrained" and row["seeds"]
    ]
    titles = [by.replace("cpu_seconds", "seconds of the processor"), vapo["title"]]
    titles += [title for row in rows for title in (row["title"], f"VAPO less {row['title']}")]
    lines = [f"| {' | '.join(titles)} |", "|---:|" + "---:|" * (len(titles) - 1)]
    last = [found[by][-1] for found in vapo["seeds"].values() if by in found]
    for amount in (mean(last) * share for share in SHARES) if last else ():
        ours = _accuracies(setting, vapo, by, amount)
        cells = [f"{amount:.0f}", f"{mean(ours.values()):.3f}" if ours else "–"]
        for row in rows:
            found = _accuracies(setting, row, by, amount)
            cells += [f"{mean(found.values()):.3f}" if found else "–", shown(paired(ours, found))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _accuracies(setting: Figures, row: Figures, by: str, amount: float) -> dict[int, float]:
    """By seed, where the row has spent as much but for a twentieth."""
    found = {}
    for seed, figures in row["seeds"].items():
        critic, most = setting["critics"][seed], figures.get(by, [0])[-1]
        start = critic[by] if row["critic"] == "pretrained" else 0
        accuracy = accuracy_at(figures, (start, critic["accuracy"]), by, min(amount, most))
        if accuracy is not None and most >= 0.95 * amount:
            found[int(seed)] = accuracy
    return found


def cost_table(setting: Figures) -> str:
    """What was spent, value pretraining's counted, until an evaluation first reached each
    threshold, and in all."""
    titles = [
        "",
        *(f"responses to {t:g}" for t in THRESHOLDS),
        "responses of a step",
        "CPU seconds of a step",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for row in (row for row in setting["rows"].values() if row["seeds"]):
        cells = [row["title"], *(_until(setting, row, threshold) for threshold in THRESHOLDS)]
        cells += [_of_a_step(row, "responses", ".0f"), _of_a_step(row, "cpu_seconds", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _until(setting: Figures, row: Figures, threshold: float) -> str:
    starts = {seed: critic["accuracy"] for seed, critic in setting["critics"].items()}
    found = [
        reached(figures, starts[seed], threshold, "responses")
        for seed, figures in row["seeds"].items()
    ]
    there = known(found)
    if not there:
        return "not reached"
    return f"{mean(there):.0f}" + (
        "" if len(there) == len(found) else f" ({len(there)} of {len(found)} seeds)"
    )


def _of_a_step(row: Figures, by: str, form: str) -> str:
    found = [figures[by] for figures in row["seeds"].values() if len(figures.get(by, ())) > 1]
    return (
        f"{mean((each[-1] - each[0]) / (len(each) - 1) for each in found):{form}}" if found else "–"
    )


def spread(values: list[float]) -> str:
    """Mean with its 95 % interval; of one value, the value; – of none."""
    if not values:
        return "–"
    found = interval(values)
    return f"{found.mean:.3f}" + ("" if math.isnan(found.half) else f" ± {found.half:.3f}")


def course(seeds: list[dict[str, Any]], name: str, form: str, steps: int) -> str:
    """First -> last value of a metric within so many steps, mean over seeds; empty where there is
    none."""
    values = [known(found[name][:steps]) for found in seeds if name in found]
    if not values or not all(values):
        return ""
    return f"{mean(v[0] for v in values):{form}} → {mean(v[-1] for v in values):{form}}"
