"""VAPO's ablation with transformers, on the program that trains at any scale.
 `python -m examples.ablation.run` runs what is missing and presents what is there; run it again
after an interruption.
"""

import signal
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.ablation.ablation_config import AblationConfig, read_ablation
from examples.ablation.execute import Outcome, as_it_stands, execute, unfinished
from examples.ablation.forked import import_program
from examples.ablation.page import MEASURED, write_pages
from examples.ablation.plan import HERE, ROOT, Job, plan_jobs
from examples.ablation.results import collect, write_figures
from examples.ablation.transformer_tables import (
    accuracy_table,
    cost_table,
    critic_table,
    equal_table,
    finished,
    missing,
)
from examples.ablation.tuned_tables import tuned_report
from vapo_megatron.errors import BadInput, RunFailed, VapoError


class Variant(StrEnum):
    """Other settings than ablation.yaml's."""

    LONG = "long"
    TUNED = "tuned"
    VALUES = "values"


console = Console(highlight=False, soft_wrap=True)


def show_plan(config: AblationConfig, jobs: list[Job], waiting: list[Job]) -> None:
    """Say what will run, and for how long."""
    minutes = sum(job.seconds for job in waiting) / config.workers / 60
    console.print(
        f"[bold]Ablation[/bold]: seeds {', '.join(map(str, config.seeds))}, {config.steps} steps, "
        f"{config.workers} runs at once\n{len(jobs)} jobs with tasks, cold starts and critics; "
        f"{len(jobs) - len(waiting)} are finished, {len(waiting)} to run: about {minutes:.0f} "
        "minutes on two idle cores"
    )
    for setting in config.settings:
        console.print(f"  {setting.name}: {', '.join(row.name for row in config.rows_of(setting))}")


def main(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="over ablation.yaml, such as steps=12"),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs and of measured.json")] = Path(
        "runs/ablation"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="a row to run; may be given again. VAPO is always run")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="a setting to run; may be given again")
    ] = None,
    variant: Annotated[
        Variant | None,
        typer.Option(
            help="ablation_VARIANT.yaml in place of ablation.yaml; tuned and values: each row at "
            "its rate"
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="say what would run, and end")] = False,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="run nothing, present what is finished")
    ] = False,
    docs: Annotated[
        bool,
        typer.Option(
            "--docs",
            help="write the figures into examples/ablation/measured, results/ablation.md and "
            "docs/ablation.md",
        ),
    ] = False,
) -> None:
    """Run VAPO's ablation table, PPO, VC-PPO, GRPO and DAPO with several seeds; resumes where it
    was stopped."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs as Ctrl-C does
    try:
        if docs and variant == Variant.VALUES:
            raise BadInput(
                "--docs: the page has no table of --variant values; leave one of them out"
            )
        file = HERE / (f"ablation_{variant}.yaml" if variant else "ablation.yaml")
        config = read_ablation(file, overrides or [], only or [], settings or [])
        jobs = plan_jobs(config, out.resolve())
        show_plan(config, jobs, unfinished(jobs))
        if plan:
            return
        if as_is:
            outcome = as_it_stands(jobs)
        else:
            import_program()
            outcome = execute(jobs, config.workers, out.resolve(), console.print)
        chosen = [f"--only {row}" for row in only or []] + [
            f"--setting {setting}" for setting in settings or []
        ]
        words = [
            "python -m examples.ablation.run",
            *([f"--variant {variant}"] if variant else []),
            *(overrides or []),
            *chosen,
            "--docs",
        ]
        command = " ".join(words)
        measured = (
            MEASURED / f"{'tuned' if variant == Variant.TUNED else 'transformer'}.json"
            if docs
            else None
        )
        present(
            config,
            out.resolve(),
            outcome,
            command,
            measured,
            time.monotonic() - started,
            variant in (Variant.TUNED, Variant.VALUES),
        )
    except VapoError as error:
        typer.echo(f"ablation: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("ablation: interrupted; the same command resumes it", err=True)
        raise typer.Exit(130) from None


def present(
    config: AblationConfig,
    out: Path,
    outcome: Outcome,
    command: str,
    measured: Path | None,
    seconds: float,
    tuned: bool,
) -> None:
    """Print tables and write figures of all that is finished; fail where a job did.

    measured: file of the figures that the page is made of, which is then written too. tuned: each
        row has its own
    learning rate, and the tables compare areas.
    """
    figures = collect(config, out, {*outcome.done, *outcome.skipped}, outcome.refused) | {
        "command": command
    }
    write_figures(figures, out / "measured.json")
    for name, setting in figures["settings"].items():
        if setting["critics"]:
            console.print(f"\n[bold]{name}[/bold]\n\n{critic_table(setting)}\n")
        if setting["rows"]["vapo"]["seeds"]:
            console.print(f"{accuracy_table(setting, config.steps)}\n\n{cost_table(setting)}\n")
            equal = [equal_table(setting, by) for by in ("responses", "cpu_seconds")]
            console.print(
                tuned_report(setting, config.steps) if tuned else "\n\n".join(equal), markup=False
            )
    console.print(
        f"[bold green]{len(outcome.done)} jobs run, {len(outcome.skipped)} were finished before, "
        f"{len(outcome.refused)} not run[/bold green] ({seconds / 60:.1f} minutes)\n  figures  "
        f"{out / 'measured.json'}"
    )
    if measured and finished(figures):
        write_figures(figures, measured)
        for path in write_pages(ROOT):
            console.print(f"  page     {path}")
        for line in missing(figures):
            console.print(f"  missing  {line}")
    if outcome.failed:
        name, why = next(iter(outcome.failed.items()))
        raise RunFailed(f"{len(outcome.failed)} failed, the first of them {name}: {why}")


if __name__ == "__main__":
    typer.run(main)
