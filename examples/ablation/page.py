"""results/ablation.md with all tables, docs/ablation.md with the conclusions, and their images.

    python -m examples.ablation.page
 Both pages are rendered from the figures in measured/. Text that depends on a result stands in the
templates behind a condition on the figures.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from examples.ablation import transformer_tables as transformer
from examples.ablation import tuned_tables
from examples.ablation.figures import save_tabular_figure, save_transformer_figure
from examples.ablation.intervals import shown
from examples.ablation.results import Figures, read_figures
from examples.ablation.tabular.settings import ABOUT, CHOSEN, FORKS_ABOUT
from examples.ablation.tabular.tables import (
    as_interval,
    budget_table,
    forks_finding,
    forks_table,
    price_findings,
    price_table,
    replication_table,
    tabular_table,
    tether_table,
)
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.files import atomic_write

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
    "critic": "Decoupled GAE and value pretraining: how far and how fast the policy moves, and the "
    "critic",
    "clip": "Clip-higher: how much is clipped, and what else may raise a rare decision",
    "groups": "Group sampling: prompts and samples of 128 responses",
}


# Files of the tabular stage in measured/, in the order of render().
TABULAR = (
    "tabular",
    "sweep",
    "price",
    "forks",
    "price_again",
    "forks_again",
    "tether",
    "tether_forks",
)


def render(
    template: str,
    tabular: Figures,
    sweep: Figures,
    price: Figures,
    forks: Figures,
    price_again: Figures,
    forks_again: Figures,
    tether: Figures,
    tether_forks: Figures,
    measured: Figures | None,
    tuned: Figures | None,
) -> str:
    """Render a template, results.md.j2 or summary.md.j2, to Markdown.

    price_again, forks_again: the same on fresh seeds.
    tether, tether_forks: rows with TETHER's baseline beside some of price and forks.
    measured, tuned: figures of the transformer stage; None where it was not run, which the page
        then says.
    """
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
    facts |= {
        "techniques": _techniques(tabular),
        "table": tabular_table,
        "budgets": budget_table,
        "behind": _behind,
    }
    facts |= {"price": price, "price_table": price_table, "price_findings": price_findings}
    facts |= {
        "forks": forks,
        "forks_about": FORKS_ABOUT,
        "forks_table": forks_table,
        "forks_finding": forks_finding,
        "again": replication_table(price, price_again, forks, forks_again),
        "tether": tether_table(tether, tether_forks),
    }
    facts |= {"sweep": sweep, "sweep_table": sweep_table, "questions": QUESTIONS}
    return environment.get_template(template).render(facts)


def _techniques(tabular: Figures) -> list[dict[str, str]]:
    """Of each technique VAPO's lead over the row without it in each setting, and in how many it is
    shown."""
    lines = []
    for name, title in TECHNIQUES.items():
        cells: dict[str, str] = {}
        better, worse = [], []
        for setting, figures in tabular["settings"].items():
            row = figures["rows"].get(name)
            found = (
                [as_interval(row[key]) for key in ("final_less", "area_less")]
                if row
                else [None, None]
            )
            cells[setting] = "; ".join(shown(each) for each in found)
            if any(each and each.excludes_zero and each.mean > 0 for each in found):
                better.append(setting)
            if any(each and each.excludes_zero and each.mean < 0 for each in found):
                worse.append(setting)
        behind = [
            setting
            for setting, figures in tabular["settings"].items()
            if _behind_at_equal(figures, name)
        ]
        finding = f"shown in {', '.join(better)}" if better else "not shown"
        finding += f"; reversed in {', '.join(worse)}" if worse else ""
        finding += f"; VAPO behind at equal responses in {', '.join(behind)}" if behind else ""
        lines.append({"title": title, "finding": finding} | cells)
    return lines


def _behind_at_equal(figures: Figures, name: str) -> bool:
    """Whether a row that draws fewer responses than VAPO is ahead of it at the most responses that
    both have drawn."""
    if (
        name not in figures["rows"]
        or figures["rows"][name]["responses"] == figures["rows"]["vapo"]["responses"]
    ):
        return False
    found = [
        as_interval(at["rows"][name]["less"])
        for at in figures["equal_responses"]
        if name in at["rows"]
    ]
    return bool(found) and found[-1] is not None and found[-1].excludes_zero and found[-1].mean < 0


def _behind(figures: Figures) -> list[str]:
    """Titles of the rows that VAPO ends behind, by more than the interval."""
    found = {row["title"]: as_interval(row.get("final_less")) for row in figures["rows"].values()}
    return [title for title, less in found.items() if less and less.excludes_zero and less.mean < 0]


def sweep_table(figures: Figures, question: str) -> str:
    """The probes of one question: what was changed, and by how much the first row is ahead of each
    other."""
    lines = [
        "| changed | first row | compared with | first less this, final | mean | clipped high, "
        "first row |"
    ]
    lines.append("|---|---|---|---:|---:|---:|")
    for probe in (found for found in figures["probes"].values() if found["question"] == question):
        first, *others = probe["rows"].values()
        changed = ", ".join(f"`{change}`" for change in probe["changes"]) or "nothing"
        cells = [changed, f"{first['title']} {first['final'][0]:.3f}"]
        for other in others or [None]:
            less = (
                [shown(as_interval(other[key])) for key in ("less", "less_area")]
                if other
                else ["", ""]
            )
            ends = [
                "" if other is None else other["title"],
                *less,
                f"{100 * first['clip_high']:.2f} %",
            ]
            lines.append(f"| {' | '.join([*cells, *ends])} |")
            cells = ["", ""]
    return "\n".join(lines)


def render_pages(measured: Path = MEASURED) -> dict[str, str]:
    """Both pages as Markdown, by their path in the repository.

    Raises:
        BadInput: a file of the tabular stage is missing from measured/.
    """
    tables = [read_figures(measured / f"{name}.json") for name in TABULAR]
    paths = [measured / f"{name}.json" for name in ("transformer", "tuned")]
    optional = [read_figures(path) if path.is_file() else None for path in paths]
    templates = {"results/ablation.md": "results.md.j2", "docs/ablation.md": "summary.md.j2"}
    return {page: render(template, *tables, *optional) for page, template in templates.items()}


def write_pages(root: Path, measured: Path = MEASURED) -> list[Path]:
    """Write both pages and their images under root; return the pages' paths.

    Raises:
        BadInput: a file of the tabular stage is missing from measured/.
    """
    pages = render_pages(measured)
    images = root / "docs" / "images"
    save_tabular_figure(read_figures(measured / "tabular.json"), images / "ablation_tabular.png")
    if (measured / "transformer.json").is_file():
        figures = read_figures(measured / "transformer.json")
        if transformer.finished(figures):
            save_transformer_figure(figures, images / "ablation.png")
    for page, text in pages.items():
        path = root / page
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text)
    return [root / page for page in pages]


def main(root: Annotated[Path, typer.Option(help="folder of results/ and docs/")] = ROOT) -> None:
    """Write results/ablation.md and docs/ablation.md from examples/ablation/measured."""
    with told_in_one_line("ablation"):
        for path in write_pages(root):
            typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
