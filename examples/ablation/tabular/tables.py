"""Tables of the tabular stage with their intervals, for its commands and for
results/ablation.md."""

from typing import Any

from ..intervals import Interval, shown
from .settings import ALL_PRICE_ROWS, FORKS, PRICE_ROWS

Figures = dict[str, Any]


def as_interval(found: Any) -> Interval | None:
    """An interval from JSON: mean and half width, null where they are not numbers; None stays."""
    return (
        None
        if found is None
        else Interval(*(float("nan") if x is None else float(x) for x in found))
    )


def tabular_table(figures: Figures) -> str:
    """All rows of a setting of the tabular stage."""
    titles = ["", "final", "area", "VAPO less this, final", "VAPO less this, area", "tokens"]
    titles += ["insight", "explained variance", "clipped high"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for row in figures["rows"].values():
        compared = "final_less" in row
        cells = [row["title"], f"{row['final'][0]:.3f}", f"{row['area'][0]:.3f}"]
        cells += [
            shown(as_interval(row[key])) if compared else "" for key in ("final_less", "area_less")
        ]
        cells += [f"{row['length']:.0f}", f"{row['insight']:.2f}" if row["insight"] else ""]
        explains = (
            f"{row['explains_first']:.2f} → {row['explains_last']:.2f}"
            if "explains_first" in row
            else ""
        )
        cells += [explains, f"{100 * row['clip_high']:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def budget_table(figures: Figures) -> str:
    """Accuracy at equal numbers of responses: VAPO against what needs no value pretraining."""
    rows = [name for name in ("no_value_pretraining", "grpo", "dapo") if name in figures["rows"]]
    titles = ["responses", "VAPO"]
    for name in rows:
        title = figures["rows"][name]["title"]
        titles += [title, f"VAPO less {title}"]
    lines = [f"| {' | '.join(titles)} |", "|---:|" + "---:|" * (len(titles) - 1)]
    for at in figures["equal_responses"]:
        cells = [str(at["responses"]), f"{at['rows']['vapo']['accuracy'][0]:.3f}"]
        for name in rows:
            found = at["rows"].get(name)
            cells += (
                [f"{found['accuracy'][0]:.3f}", shown(as_interval(found["less"]))]
                if found
                else ["–", "–"]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def price_table(price: Figures, kind: str) -> str:
    """Area of every row in every setting, at the setting's learning rate (common) or its own
    (tuned), and its rank."""
    settings = price["settings"]
    lines = [f"| | {' | '.join(f'{name}: area | less reinforce_direct' for name in settings)} |"]
    lines.append("|---|" + "---:|---:|" * len(settings))
    for row, about in ALL_PRICE_ROWS.items():
        if not all(row in figures["rates"] for figures in settings.values()):
            continue
        cells = [about.title]
        for figures in settings.values():
            found = figures["tables"][kind][row]
            rate = f" (x{figures['rates'][row]['best']:g})" if kind == "tuned" else ""
            cells += [
                f"{found['area'][0]:.3f}{rate}",
                shown(as_interval(found.get("less_reinforce_direct"))),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def price_findings(price: Figures) -> list[str]:
    """What the tuned rows say of a critic, of its price, and of a critic that knows nothing."""

    def lead(row: str, other: str) -> str:
        """In each setting, the row less the other."""
        tables = {name: figures["tables"]["tuned"] for name, figures in price["settings"].items()}
        return ", ".join(
            f"{shown(as_interval(table[row][f'less_{other}']))} ({name})"
            for name, table in tables.items()
        )

    return [
        "vapo_direct less reinforce_direct, the batch's mean as baseline: "
        f"{lead('direct', 'reinforce_direct')}",
        "vapo_direct less vapo_without_critic, VAPO's loss with the group's mean: "
        f"{lead('direct', 'without_critic')}",
        "the prompt's history alone (SPO's tracker, no critic) less vapo_direct: "
        f"{lead('tracker', 'direct')}",
        "vapo_direct with a critic of noise less reinforce_direct: "
        f"{lead('direct_noise', 'reinforce_direct')}",
        "the same less vapo_direct, which is what the critic itself brings: "
        f"{lead('direct_noise', 'direct')}",
        f"VAPO with value pretraining less reinforce_direct: {lead('vapo', 'reinforce_direct')}",
        "vapo_direct with the prompt's history in place of no group (SPO's tracker) less "
        f"vapo_direct without: {lead('direct_tracker', 'direct')}",
    ]


def forks_table(forks: Figures) -> str:
    """Every row of the task that a critic should win: area, and by how much vapo_direct is
    ahead."""
    lines = [
        "| | area | accuracy at the end | vapo_direct less this, area |",
        "|---|---:|---:|---:|",
    ]
    figures = forks["settings"]["forks"]
    for row, found in figures["tables"]["tuned"].items():
        less = as_interval(found.get("less_direct"))
        ahead = shown(None if less is None else Interval(-less.mean, less.half))
        ends = (
            f"{found['area'][0]:.3f} (x{figures['rates'][row]['best']:g}) | "
            f"{found['final'][0]:.3f} | {ahead}"
        )
        lines.append(f"| {ALL_PRICE_ROWS[row].title} | {ends} |")
    return "\n".join(lines)


def forks_finding(forks: Figures) -> str:
    """Whether anything without a critic comes near."""
    rows = forks["settings"]["forks"]["tables"]["tuned"]
    best = max((row for row in rows if row != "direct"), key=lambda row: rows[row]["area"][0])
    less = as_interval(rows[best]["less_direct"])
    assert less is not None
    title, end = (
        ALL_PRICE_ROWS[best].title,
        f"{rows['direct']['final'][0]:.3f} against {rows[best]['final'][0]:.3f}",
    )
    if less.excludes_zero and less.mean < 0:
        final, best_other = (
            rows["direct"]["final"][0],
            max(rows[row]["final"][0] for row in rows if row != "direct"),
        )
        return (
            f"No other row comes near: vapo_direct ends at {final:.3f}, the best other at "
            f"{best_other:.3f}."
        )
    return (
        f"A critic does not win here: the best without one, {title}, ends level or ahead ({end})."
    )


def tether_table(price: Figures, forks: Figures) -> str:
    """Area of each row at its own learning rate in every setting, and its lead over the row without
    a critic."""
    settings = price["settings"] | forks["settings"]
    header = " | ".join(f"{name}: area | less without critic" for name in settings)
    lines = [f"| | {header} |", "|---|" + "---:|---:|" * len(settings)]
    for row, about in ALL_PRICE_ROWS.items():
        tables = [figures["tables"]["tuned"] for figures in settings.values()]
        if not all(row in found for found in tables):
            continue
        cells = []
        for found in tables:
            cells.append(f"{found[row]['area'][0]:.3f}")
            cells.append(shown(as_interval(found[row].get("less_without_critic"))))
        lines.append(f"| {about.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def replication_table(
    price: Figures, price_again: Figures, forks: Figures, forks_again: Figures
) -> str:
    """The leads of price_findings and of forks beside those on fresh seeds; learning rates are
    chosen on the same seeds as before."""
    claims = [line.partition(": ") for line in price_findings(price)]
    again = [line.partition(": ") for line in price_findings(price_again)]
    rows = [(claim, was, now) for (claim, _, was), (_, _, now) in zip(claims, again, strict=True)]

    def lead(figures: Figures) -> str:
        table = figures["settings"]["forks"]["tables"]["tuned"]
        return shown(as_interval(table["direct"]["less_reinforce_direct"]))

    rows.append(("forks: vapo_direct less reinforce_direct", lead(forks), lead(forks_again)))
    header = f"| | {_seeds(price)} | {_seeds(price_again)} |"
    lines = [f"| {claim} | {was} | {now} |" for claim, was, now in rows]
    return "\n".join([header, "|---|---|---|", *lines])


def _seeds(figures: Figures) -> str:
    """Seeds as runs of consecutive ones."""
    seeds = figures["seeds"]
    runs = [[seeds[0], seeds[0]]]
    for seed in seeds[1:]:
        if seed == runs[-1][1] + 1:
            runs[-1][1] = seed
        else:
            runs.append([seed, seed])
    return "seeds " + ", ".join(f"{first} to {last}" for first, last in runs)


def regression_table(price: Figures) -> str:
    """Values by regression at their own learning rates beside what they are compared with, setting
    by setting: areas, their leads, and the explained variance of values."""
    others = ("reinforce_direct", "without_critic", "direct")
    leads = " | ".join(f"less {ALL_PRICE_ROWS[other].title}" for other in others)
    lines = [
        f"| setting | | area | at the end | {leads} | explained |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for setting, figures in price["settings"].items():
        for row, found in figures["tables"]["tuned"].items():
            cells = [setting, ALL_PRICE_ROWS[row].title]
            cells.append(f"{found['area'][0]:.3f} (x{figures['rates'][row]['best']:g})")
            cells.append(f"{found['final'][0]:.3f}")
            cells += [shown(as_interval(found.get(f"less_{other}"))) for other in others]
            explains = found.get("explains")
            cells.append("–" if explains is None else f"{explains[0]:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def price_report(figures: Figures) -> str:
    """The tables of the settings and rows that were run, and findings where no row is missing."""
    settings, parts = dict(figures["settings"]), []
    forks = settings.pop(FORKS.name, None)
    if settings:
        price = figures | {"settings": settings}
        if all(row in found["rates"] for found in settings.values() for row in PRICE_ROWS):
            parts.append("\n".join(f"- {line}" for line in price_findings(price)))
        parts.append(
            "Each row at its own learning rate (times the "
            f"setting's):\n\n{price_table(price, 'tuned')}"
        )
        parts.append(f"All rows at the setting's learning rate:\n\n{price_table(price, 'common')}")
    if forks is not None:
        parts.append(f"{FORKS.name}, each row at its own learning rate:\n\n{forks_table(figures)}")
        if "direct" in forks["rates"] and len(forks["rates"]) > 1:
            parts.append(forks_finding(figures))
    return "\n\n".join(parts)
