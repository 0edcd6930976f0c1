"""Tables of the transformer ablation in which every row has its own learning rate, from
measured/tuned.json."""

from statistics import mean
from typing import Any

from examples.ablation.intervals import Interval, interval, paired, shown
from examples.ablation.results import Figures, accuracy_at, finals, known, mean_over_steps
from examples.ablation.transformer_tables import refused

POINTS = 32  # at which a course is read for its mean


def draws_as_much(row: Figures) -> bool:
    """Whether a row draws as many responses as VAPO with its value pretraining."""
    return bool(row["more_steps"]) or row["critic"] == "pretrained"


def least_spent(setting: Figures, by: str) -> float:
    """What every row that draws as much as VAPO has spent at its end. by: "responses" or
    "cpu_seconds"."""
    rows = [row for row in setting["rows"].values() if draws_as_much(row)]
    return min(seed[by][-1] for row in rows for seed in row["seeds"].values())


def area(setting: Figures, row: Figures, by: str) -> dict[int, float]:
    """Mean accuracy, by seed, over what every row has spent; value pretraining's is counted. Empty
    for a row that draws less."""
    if not draws_as_much(row):
        return {}
    most, areas = least_spent(setting, by), {}
    for seed, figures in row["seeds"].items():
        critic = setting["critics"][seed]
        start = (critic[by] if row["critic"] == "pretrained" else 0.0, critic["accuracy"])
        course = [accuracy_at(figures, start, by, most * (n + 0.5) / POINTS) for n in range(POINTS)]
        areas[int(seed)] = mean(known(course))
    return areas


def lead(setting: Figures, first: str, second: str, by: str = "responses") -> Interval | None:
    """Area of the first row less the second's, paired by seed."""
    rows = setting["rows"]
    return paired(area(setting, rows[first], by), area(setting, rows[second], by))


QUESTIONS = (
    ("the loss (token mean, clip-higher, positive NLL)", "without_critic", "grpo"),
    (
        "the sampling (one response a prompt, the batch's mean in place of the group's)",
        "reinforce_direct",
        "without_critic",
    ),
    ("the critic, calibrated and trusted as far as it explains", "direct", "reinforce_direct"),
    ("the pretrained critic at its price", "vapo", "without_critic"),
    ("all of it", "direct", "grpo"),
)


def tuned_findings(setting: Figures) -> list[str]:
    """What of the lead is the loss, the sampling and the critic: leads in area by responses, and by
    seconds."""
    titles = {name: row["title"] for name, row in setting["rows"].items()}
    return [
        f"{what}: {titles[first]} less {titles[second]} is {shown(lead(setting, first, second))} "
        f"by responses, {shown(lead(setting, first, second, 'cpu_seconds'))} by seconds"
        for what, first, second in QUESTIONS
    ]


def tuned_table(setting: Figures, rows: list[str], compared_with: str, steps: int) -> str:
    """Accuracy per step, per response and per second of the rows, and their lead over one of them
    in area."""
    titles = ["", "rate", f"after {steps} steps", "area by responses", "area by seconds"]
    titles += [f"less {setting['rows'][compared_with]['title']}, by responses", "by seconds"]
    titles += ["explained variance", "KL of an update"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for name in rows:
        row = setting["rows"][name]
        if not row["seeds"]:
            continue
        seeds = list(row["seeds"].values())
        cells = [row["title"], f"x{row['rate']:g}", spread(finals(row, steps))]
        cells += [spread(area(setting, row, by)) for by in ("responses", "cpu_seconds")]
        for by in ("responses", "cpu_seconds"):
            cells.append(
                "–" if name == compared_with else shown(lead(setting, name, compared_with, by))
            )
        explained = [
            mean(known(seed["explained"][:steps])) for seed in seeds if "explained" in seed
        ]
        cells.append(f"{mean(explained):.2f}" if explained else "")
        cells.append(f"{mean(mean(known(seed['kl'][:steps])) for seed in seeds):.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: dict[int, float]) -> str:
    """Mean over seeds with its 95 % interval."""
    return shown(interval(list(values.values())) if values else None, mark=False).lstrip("+")


def tuned_headline(setting: Figures) -> str:
    """What area by responses says of `direct` beside each row without a critic, and beside VAPO."""
    leads = {
        name: lead(setting, "direct", name)
        for name in ("reinforce_direct", "without_critic", "grpo", "vapo")
    }
    kinds: dict[str, list[str]] = {"beats": [], "is level with": [], "is behind": []}
    for name, by in leads.items():
        word = (
            "is level with"
            if by is None or not by.excludes_zero
            else "beats"
            if by.mean > 0
            else "is behind"
        )
        kinds[word].append(f"`{setting['rows'][name]['preset']}` ({shown(by)})")
    verdict = " and ".join(f"{word} {', '.join(rows)}" for word, rows in kinds.items() if rows)
    consequence = (
        "it stays a preset and not the default"
        if kinds["is level with"] or kinds["is behind"]
        else "we recommend it"
    )
    return f"measured by area over responses, `vapo_direct` {verdict}. So {consequence}"


METHODS = (
    "vapo",
    "grpo",
    "dapo",
    "without_critic",
    "reinforce_direct",
    "direct",
    "reinforce_regression",
    "vapo_regression",
    "tempo",
)


def for_page(tuned: Figures | None) -> dict[str, Any]:
    """What the page's template is given."""
    if tuned is None:
        return {}
    setting, steps = tuned["settings"]["steps"], tuned["steps"]
    methods = {name: row for name, row in setting["rows"].items() if name in METHODS}
    kinds = [name for name, row in setting["rows"].items() if name not in METHODS and row["seeds"]]
    long = setting | {"rows": methods}
    return {
        "tuned_responses": next(critic["responses"] for critic in setting["critics"].values()),
        "spent": {
            "responses": f"{least_spent(long, 'responses'):.0f}",
            "seconds": f"{least_spent(long, 'cpu_seconds'):.0f}",
        },
        "tuned_findings": tuned_findings(long),
        "tuned_headline": tuned_headline(long),
        "tuned_seeds": len(setting["rows"]["direct"]["seeds"]),
        "tuned_refused": refused(long),
        "tuned_methods": tuned_table(long, list(methods), "reinforce_direct", steps),
        "tuned_kinds": kinds and kinds_table(setting, ["direct", *kinds], steps),
    }


def tuned_report(setting: Figures, steps: int) -> str:
    """The tables of rows with finished seeds, and findings where no method is missing."""
    rows = {name: row for name, row in setting["rows"].items() if row["seeds"]}
    finished, parts = setting | {"rows": rows}, []
    methods = [name for name in METHODS if name in rows]
    asked = {name for _, first, second in QUESTIONS for name in (first, second)}
    if asked <= set(methods):
        parts.append("\n".join(f"- {line}" for line in tuned_findings(finished)))
    if methods:
        compared_with = "reinforce_direct" if "reinforce_direct" in methods else methods[0]
        of_methods = finished | {"rows": {name: rows[name] for name in methods}}
        parts.append(tuned_table(of_methods, methods, compared_with, steps))
    if "direct" in rows and len(rows) > len(methods):
        parts.append(
            kinds_table(
                finished, ["direct", *(name for name in rows if name not in METHODS)], steps
            )
        )
    return "\n\n".join(parts)


def kinds_table(setting: Figures, rows: list[str], steps: int) -> str:
    """Accuracy and explained variance of the first row, and of others less the first, after equally
    many steps."""
    titles = [
        "",
        "seeds",
        f"after {steps} steps",
        "mean of evaluations",
        "less direct",
        "explained variance",
        "CPU seconds of a step",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    first = setting["rows"][rows[0]]
    for name in rows:
        row = setting["rows"][name]
        seeds = list(row["seeds"].values())
        means = mean_over_steps(row, steps)
        less = "–" if name == rows[0] else shown(paired(means, mean_over_steps(first, steps)))
        explained = {
            int(seed): mean(known(found["explained"][:steps]))
            for seed, found in row["seeds"].items()
        }
        seconds = mean(found["cpu_seconds"][0] for found in seeds)
        cells = [
            row["title"],
            str(len(seeds)),
            spread(finals(row, steps)),
            spread(means),
            less,
            spread(explained),
        ]
        lines.append(f"| {' | '.join([*cells, f'{seconds:.1f}'])} |")
    return "\n".join(lines)
