"""The tabular stage of the ablation: twenty seeds of every row in minutes, through the project's
own algorithms.

    python -m examples.ablation.tabular.run

What is finished is not run again: courses lie in <out>/<setting>/<row>.json, by seed. The settings
were chosen on seeds 1000 to 1019; the seeds that are reported are 0 to 19.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.facts import environment_facts

from .settings import PAPER_ROWS, ROWS, SETTINGS, Setting
from .summary import Courses, at_responses, curves, summarise
from .tables import budget_table, tabular_table
from .training import Course, Training

console = Console(highlight=False, soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    """ "3", "0-19" or "1,5,7-9".

    Raises:
        BadInput: it is none of these.
    """
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise BadInput(f"--seeds {text!r}: expected such as 3, 0-19 or 1,5,7-9") from None
    if not seeds or len(set(seeds)) < len(seeds):
        raise BadInput(f"--seeds {text!r}: expected at least one seed, and none twice")
    return seeds


def change(setting: Setting, overrides: Sequence[str]) -> Setting:
    """A setting with key=value over it, the value as JSON.

    Raises:
        BadInput: there is no such key, or the value is no JSON.
    """
    known = [field.name for field in fields(Setting)]
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in known:
            raise BadInput(
                f"{override}: a setting has no key {key}; expected one of: {', '.join(known)}"
            )
        try:
            value: Any = json.loads(text)
        except ValueError:
            raise BadInput(f"{override}: expected {key}=JSON") from None
        changes: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value}
        setting = replace(setting, **changes)
    return setting


def load_courses(path: Path, setting: Setting) -> dict[int, Course]:
    """The courses of a row that are finished, by seed; none of another setting."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if found["setting"] != json.loads(json.dumps(asdict(setting))):
        return {}
    return {int(seed): Course(**course) for seed, course in found["courses"].items()}


def run_row(setting: Setting, name: str, seeds: Sequence[int], out: Path) -> dict[int, Course]:
    """The courses of a row at these seeds; runs those that are missing, side by side, and writes
    them."""
    path = out / setting.name / f"{name}.json"
    courses = load_courses(path, setting)
    missing = [seed for seed in seeds if seed not in courses]
    if missing:
        started = time.perf_counter()
        courses |= dict(zip(missing, Training(setting, ROWS[name], missing).run(), strict=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            written = {str(seed): asdict(course) for seed, course in sorted(courses.items())}
            json.dump({"setting": asdict(setting), "courses": written}, file)
        final = sum(courses[seed].accuracy[setting.rollouts] for seed in seeds) / len(seeds)
        seconds = time.perf_counter() - started
        console.print(
            f"{setting.name:<8} {ROWS[name].title:<30} accuracy {final:.3f}   {seconds:4.0f} s"
        )
    return {seed: courses[seed] for seed in seeds}


def rows_of(setting: Setting) -> list[str]:
    """The rows of a setting's table: all in `steps`, elsewhere those of the paper."""
    return list(ROWS) if setting.name == "steps" else list(PAPER_ROWS)


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=JSON]...", help="over every setting")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help=f"of {', '.join(SETTINGS)}; default all")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="a row to run besides VAPO; may be given again")
    ] = None,
    seeds: Annotated[str, typer.Option(help="such as 3 or 0-19")] = "0-19",
    out: Annotated[Path, typer.Option(help="folder of courses and of summary.json")] = Path(
        "runs/ablation_tabular"
    ),
) -> None:
    """Run what is missing of settings, rows and seeds, write summary.json, and print its tables."""
    with told_in_one_line("ablation"):
        torch.set_num_threads(1)
        wanted = parse_seeds(seeds)
        for kind, names, known in (("--setting", settings, SETTINGS), ("--only", only, ROWS)):
            for name in names or ():
                if name not in known:
                    raise BadInput(f"{kind} {name}: expected some of: {', '.join(known)}")
        figures: dict[str, Any] = {"seeds": wanted, "facts": environment_facts(), "settings": {}}
        for name in settings or SETTINGS:
            setting = change(SETTINGS[name], overrides or [])
            rows = [row for row in rows_of(setting) if not only or row in (*only, "vapo")]
            courses: Courses = {row: run_row(setting, row, wanted, out) for row in rows}
            figures["settings"][name] = {
                "setting": asdict(setting),
                "start": sum(course.accuracy[0] for course in courses["vapo"].values())
                / len(wanted),
                "rows": summarise(courses, setting.rollouts),
                "equal_responses": at_responses(courses),
                "curves": curves(courses),
            }
        with atomic_write(out / "summary.json") as file:
            json.dump(figures, file, indent=1)
        for name, found in figures["settings"].items():
            equal = f"At equal numbers of responses:\n\n{budget_table(found)}"
            console.print(f"\n{name}\n\n{tabular_table(found)}\n\n{equal}", markup=False)
        console.print(f"\nsummary  {out / 'summary.json'}")


if __name__ == "__main__":
    typer.run(main)
