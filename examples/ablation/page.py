"""docs/ablation.md and its images, from the figures of measured/ alone.

    python -m examples.ablation.page

Text that depends on what was measured is in the template behind a condition on the figures; nothing is written by hand.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from examples.ablation import transformer_tables as transformer
from examples.ablation import tuned_tables
from examples.ablation.figures import save_tabular_figure, save_transformer_figure
from examples.ablation.intervals import Interval, shown
from examples.ablation.results import Figures, read_figures
from examples.ablation.tabular.settings import ABOUT, CHOSEN, FORKS_ABOUT, PRICE_ROWS
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.errors import told_in_one_line

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MEASURED = HERE / "measured"
TECHNIQUES = {
    "no_value_pretraining": "value pretraining",
    "no_decoupled": "decoupled GAE",
    "no_length_adaptive": "length-adaptive GAE",
    "no_clip_higher": "clip-higher",
    "no_token_level": "token-level loss",
    "no_nll": "positive-example NLL",
    "no_groups": "group sampling",
}

QUESTIONS = {
    "lengths": "Length-adaptive GAE: lengths of responses, and fixed lambdas",
    "critic": "Decoupled GAE and value pretraining: how far and how fast the policy moves, and the critic",
    "clip": "Clip-higher: how much is clipped, and what else may raise a rare decision",
    "groups": "Group sampling: prompts and samples of 128 responses",
}


def render(
    tabular: Figures,
    sweep: Figures,
    price: Figures,
    forks: Figures,
    measured: Figures | None,
    tuned: Figures | None,
) -> str:
    """The page as Markdown; without figures of the transformer it says that there are none."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    facts: dict[str, Any] = {
        "tabular": tabular,
        "about": ABOUT,
        "chosen": CHOSEN,
        "measured": measured,
        "transformer": transformer,
        "tuned": tuned,
        **tuned_tables.for_page(tuned),
    }
    facts |= {"techniques": _techniques(tabular), "table": tabular_table, "budgets": budget_table, "behind": _behind}
    facts |= {"price": price, "price_table": price_table, "price_findings": price_findings}
    facts |= {"forks": forks, "forks_about": FORKS_ABOUT, "forks_table": forks_table, "forks_finding": forks_finding}
    facts |= {"sweep": sweep, "sweep_table": sweep_table, "questions": QUESTIONS}
    return environment.get_template("ablation.md.j2").render(facts)


def _interval(found: Any) -> Interval | None:
    return None if found is None else Interval(*(float("nan") if x is None else float(x) for x in found))


def _techniques(tabular: Figures) -> list[dict[str, str]]:
    """Of each technique VAPO's lead over the row without it in each setting, and in how many it is shown."""
    lines = []
    for name, title in TECHNIQUES.items():
        cells: dict[str, str] = {}
        better, worse = [], []
        for setting, figures in tabular["settings"].items():
            row = figures["rows"].get(name)
            found = [_interval(row[key]) for key in ("final_less", "area_less")] if row else [None, None]
            cells[setting] = "; ".join(shown(each) for each in found)
            if any(each and each.excludes_zero and each.mean > 0 for each in found):
                better.append(setting)
            if any(each and each.excludes_zero and each.mean < 0 for each in found):
                worse.append(setting)
        behind = [setting for setting, figures in tabular["settings"].items() if _behind_at_equal(figures, name)]
        finding = f"shown in {', '.join(better)}" if better else "not shown"
        finding += f"; reversed in {', '.join(worse)}" if worse else ""
        finding += f"; VAPO behind at equal responses in {', '.join(behind)}" if behind else ""
        lines.append({"title": title, "finding": finding} | cells)
    return lines


def _behind_at_equal(figures: Figures, name: str) -> bool:
    """Whether a row that draws fewer responses than VAPO is ahead of it at the most responses that both have drawn."""
    if name not in figures["rows"] or figures["rows"][name]["responses"] == figures["rows"]["vapo"]["responses"]:
        return False
    found = [_interval(at["rows"][name]["less"]) for at in figures["equal_responses"] if name in at["rows"]]
    return bool(found) and found[-1] is not None and found[-1].excludes_zero and found[-1].mean < 0


def _behind(figures: Figures) -> list[str]:
    """Titles of the rows that VAPO ends behind, by more than the interval."""
    found = {row["title"]: _interval(row.get("final_less")) for row in figures["rows"].values()}
    return [title for title, less in found.items() if less and less.excludes_zero and less.mean < 0]


def tabular_table(figures: Figures) -> str:
    """All rows of a setting of the tabular stage."""
    titles = ["", "final", "area", "VAPO less this, final", "VAPO less this, area", "tokens"]
    titles += ["insight", "explained variance", "clipped high"]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for row in figures["rows"].values():
        compared = "final_less" in row
        cells = [row["title"], f"{row['final'][0]:.3f}", f"{row['area'][0]:.3f}"]
        cells += [shown(_interval(row[key])) if compared else "" for key in ("final_less", "area_less")]
        cells += [f"{row['length']:.0f}", f"{row['insight']:.2f}" if row["insight"] else ""]
        explains = f"{row['explains_first']:.2f} → {row['explains_last']:.2f}" if "explains_first" in row else ""
        cells += [explains, f"{100 * row['clip_high']:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def price_table(price: Figures, kind: str) -> str:
    """Area of every row in every setting, at the setting's learning rate (common) or its own (tuned), and its rank."""
    settings = price["settings"]
    lines = [f"| | {' | '.join(f'{name}: area | less reinforce_direct' for name in settings)} |"]
    lines.append("|---|" + "---:|---:|" * len(settings))
    for row, about in PRICE_ROWS.items():
        cells = [about.title]
        for figures in settings.values():
            found = figures["tables"][kind][row]
            rate = f" (x{figures['rates'][row]['best']:g})" if kind == "tuned" else ""
            cells += [f"{found['area'][0]:.3f}{rate}", shown(_interval(found.get("less_reinforce_direct")))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def price_findings(price: Figures) -> list[str]:
    """What the tuned rows say of a critic, of its price, and of a critic that knows nothing."""

    def lead(row: str, other: str) -> str:
        """In each setting, the row less the other."""
        tables = {name: figures["tables"]["tuned"] for name, figures in price["settings"].items()}
        return ", ".join(f"{shown(_interval(table[row][f'less_{other}']))} ({name})" for name, table in tables.items())

    return [
        f"vapo_direct less reinforce_direct, the batch's mean as baseline: {lead('direct', 'reinforce_direct')}",
        f"vapo_direct less vapo_without_critic, VAPO's loss with the group's mean: {lead('direct', 'without_critic')}",
        f"the prompt's history alone (SPO's tracker, no critic) less vapo_direct: {lead('tracker', 'direct')}",
        f"vapo_direct with a critic of noise less reinforce_direct: {lead('direct_noise', 'reinforce_direct')}",
        f"the same less vapo_direct, which is what the critic itself brings: {lead('direct_noise', 'direct')}",
        f"VAPO with value pretraining less reinforce_direct: {lead('vapo', 'reinforce_direct')}",
        f"vapo_direct with the prompt's history in place of no group (SPO's tracker) less vapo_direct without: "
        f"{lead('direct_tracker', 'direct')}",
    ]


def forks_table(forks: Figures) -> str:
    """Every row of the task that a critic should win: area, and by how much vapo_direct is ahead."""
    lines = ["| | area | accuracy at the end | vapo_direct less this, area |", "|---|---:|---:|---:|"]
    figures = forks["settings"]["forks"]
    for row, found in figures["tables"]["tuned"].items():
        less = _interval(found.get("less_direct"))
        ahead = shown(None if less is None else Interval(-less.mean, less.half))
        ends = f"{found['area'][0]:.3f} (x{figures['rates'][row]['best']:g}) | {found['final'][0]:.3f} | {ahead}"
        lines.append(f"| {PRICE_ROWS[row].title} | {ends} |")
    return "\n".join(lines)


def forks_finding(forks: Figures) -> str:
    """Whether anything without a critic comes near."""
    rows = forks["settings"]["forks"]["tables"]["tuned"]
    best = max((row for row in rows if row != "direct"), key=lambda row: rows[row]["area"][0])
    less = _interval(rows[best]["less_direct"])
    assert less is not None
    title, end = PRICE_ROWS[best].title, f"{rows['direct']['final'][0]:.3f} against {rows[best]['final'][0]:.3f}"
    if less.excludes_zero and less.mean < 0:
        final, best_other = rows["direct"]["final"][0], max(rows[row]["final"][0] for row in rows if row != "direct")
        return f"No other row comes near: vapo_direct ends at {final:.3f}, the best other at {best_other:.3f}."
    return f"A critic does not win here: the best without one, {title}, ends level or ahead ({end})."


def sweep_table(figures: Figures, question: str) -> str:
    """The probes of one question: what was changed, and by how much the first row is ahead of each other."""
    lines = ["| changed | first row | compared with | first less this, final | mean | clipped high, first row |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for probe in (found for found in figures["probes"].values() if found["question"] == question):
        first, *others = probe["rows"].values()
        changed = ", ".join(f"`{change}`" for change in probe["changes"]) or "nothing"
        cells = [changed, f"{first['title']} {first['final'][0]:.3f}"]
        for other in others or [None]:
            less = [shown(_interval(other[key])) for key in ("less", "less_area")] if other else ["", ""]
            ends = ["" if other is None else other["title"], *less, f"{100 * first['clip_high']:.2f} %"]
            lines.append(f"| {' | '.join([*cells, *ends])} |")
            cells = ["", ""]
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
            cells += [f"{found['accuracy'][0]:.3f}", shown(_interval(found["less"]))] if found else ["–", "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(docs: Path, measured: Path = MEASURED) -> Path:
    """Write ablation.md and its images into docs; return the page's path.

    Raises:
        BadInput: measured/tabular.json, sweep.json, price.json or forks.json is missing.
    """
    tables = [read_figures(measured / f"{name}.json") for name in ("tabular", "sweep", "price", "forks")]
    paths = (measured / f"{name}.json" for name in ("transformer", "tuned"))
    found, tuned = (read_figures(path) if path.is_file() else None for path in paths)
    save_tabular_figure(tables[0], docs / "images" / "ablation_tabular.png")
    if found is not None and transformer.finished(found):
        save_transformer_figure(found, docs / "images" / "ablation.png")
    with atomic_write(docs / "ablation.md") as file:
        file.write(render(*tables, found, tuned))
    return docs / "ablation.md"


def main(docs: Annotated[Path, typer.Option(help="folder of the page")] = ROOT / "docs") -> None:
    """Write docs/ablation.md from examples/ablation/measured."""
    with told_in_one_line("ablation"):
        typer.echo(write_page(docs))


if __name__ == "__main__":
    typer.run(main)
