"""What a critic costs and brings by responses drawn: vapo_direct and methods without a critic, each
at its own rate.

    python -m examples.ablation.tabular.price
    python -m examples.ablation.tabular.price --setting forks --seeds 3000-3009 --out
    runs/ablation_forks.json
    python -m examples.ablation.tabular.price --regression --setting insight --setting forks

Learning rates are chosen on seeds 1000 to 1004 by the mean accuracy over the responses drawn, from
a grid that grows until the best is not at its edge; the seeds that are reported were not run
before. Value pretraining's responses count: every row has as many as VAPO in all.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import torch
import typer

from vapo_megatron.errors import told_in_one_line
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.facts import environment_facts

from ..intervals import interval
from .run import change, console, parse_seeds
from .settings import (
    ALL_PRICE_ROWS,
    FORKS,
    FORKS_ROWS,
    PRICE_ROWS,
    REGRESSION_ROWS,
    SETTINGS,
    Setting,
)
from .tables import price_report, regression_table
from .training import Course, Training

GRID = (1.0, 2.0, 4.0, 8.0)
REFERENCES = ("direct", "reinforce_direct", "without_critic")
CHOOSING = list(range(1000, 1005))


class Score(NamedTuple):
    """What is compared of a course: mean accuracy over the responses drawn, accuracy after them,
    and mean explained variance of the values of its rollouts (None without values)."""

    area: float
    final: float
    explains: float | None


def accuracy_at(course: Course, responses: float) -> float:
    """Accuracy at a number of responses, in a straight line between measurements; the start before
    the first."""
    for i in range(len(course.responses) - 1, -1, -1):
        here = course.responses[i]
        if here <= responses:
            if i + 1 == len(course.responses):
                return course.accuracy[i]
            part = (responses - here) / (course.responses[i + 1] - here)
            return course.accuracy[i] + part * (course.accuracy[i + 1] - course.accuracy[i])
    return course.accuracy[0]


def area(course: Course, total: int) -> float:
    """Mean accuracy over the responses drawn, at a hundred points."""
    return mean(accuracy_at(course, total * (i + 1) / 100) for i in range(100))


def score(course: Course, total: int) -> Score:
    """The score of a course after a number of responses."""
    explains = None
    if "critic_explains" in course.metrics:
        explains = mean(course.metrics["critic_explains"])
    return Score(area(course, total), accuracy_at(course, total), explains)


def choose_rate(score: Callable[[float], float]) -> dict[float, float]:
    """Scores by learning rate: of the grid, and on beyond an edge of it as long as the best is
    there."""
    scores = {rate: score(rate) for rate in GRID}
    while len(scores) < 10:
        rates, best = sorted(scores), max(scores, key=scores.__getitem__)
        if best == rates[0]:
            further = best / 2
        elif best == rates[-1]:
            further = best * 2
        else:
            break
        scores[further] = score(further)
    return scores


def compare(
    setting: Setting, seeds: list[int], only: list[str], common: bool = True
) -> dict[str, Any]:
    """Each row at the setting's learning rate (unless common is False) and at its own: area and
    final accuracy, and its lead over references."""
    total = (setting.rollouts + setting.pretraining) * setting.samples
    scores: dict[str, dict[str, dict[int, Score]]] = {"tuned": {}}
    if common:
        scores = {"common": {}, "tuned": {}}
    rates: dict[str, Any] = {}

    def run(name: str, rate: float, seeds: list[int]) -> list[Score]:
        courses = Training(setting, replace(ALL_PRICE_ROWS[name], lr=rate), seeds).run()
        return [score(course, total) for course in courses]

    for name in only:
        grid = choose_rate(
            lambda rate, name=name: mean(found.area for found in run(name, rate, CHOOSING))  # type: ignore[misc]
        )
        best = max(grid, key=grid.__getitem__)
        rates[name] = {"best": best, "grid": {str(rate): grid[rate] for rate in sorted(grid)}}
        scores["tuned"][name] = dict(zip(seeds, run(name, best, seeds), strict=True))
        if common and best == 1.0:
            scores["common"][name] = scores["tuned"][name]
        elif common:
            scores["common"][name] = dict(zip(seeds, run(name, 1.0, seeds), strict=True))
        console.print(f"{setting.name:<8} {ALL_PRICE_ROWS[name].title:<30} learning rate x{best:g}")
    tables: dict[str, Any] = {}
    for kind, rows in scores.items():
        tables[kind] = {}
        for name, by_seed in rows.items():
            row: dict[str, Any] = {
                "area": interval([found.area for found in by_seed.values()]),
                "final": interval([found.final for found in by_seed.values()]),
            }
            for other in REFERENCES:
                if other in rows and other != name:
                    row[f"less_{other}"] = interval(
                        [by_seed[seed].area - rows[other][seed].area for seed in seeds]
                    )
            explains = [found.explains for found in by_seed.values() if found.explains is not None]
            if explains:
                row["explains"] = interval(explains)
            tables[kind][name] = row
    return {"responses": total, "rates": rates, "tables": tables}


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=JSON]...", help="over every setting")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="default: all but forks")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="a row; may be given again; default: all")
    ] = None,
    seeds: Annotated[str, typer.Option(help="such as 3 or 2000-2009")] = "2000-2009",
    out: Annotated[Path, typer.Option(help="the JSON to write")] = Path("runs/ablation_price.json"),
    regression: Annotated[
        bool, typer.Option("--regression", help="values by regression beside what needs no critic")
    ] = False,
) -> None:
    """Choose learning rates, run the reported seeds, write all figures, and print them as
    results/ablation.md does."""
    with told_in_one_line("ablation"):
        torch.set_num_threads(1)
        wanted = parse_seeds(seeds)
        figures: dict[str, Any] = {"seeds": wanted, "facts": environment_facts(), "settings": {}}
        for name in settings or SETTINGS:
            setting = change((SETTINGS | {FORKS.name: FORKS})[name], overrides or [])
            rows = list(FORKS_ROWS if name == FORKS.name else PRICE_ROWS)
            if regression:
                rows = list(REGRESSION_ROWS)
            figures["settings"][name] = compare(setting, wanted, only or rows, not regression)
            out.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(out) as file:
                json.dump(figures, file, indent=1)
        report = regression_table(figures) if regression else price_report(figures)
        console.print(f"\n{report}\n\nfigures  {out}", markup=False)


if __name__ == "__main__":
    typer.run(main)
