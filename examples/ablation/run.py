"""VAPO's ablation at small scale, on the program that trains at any scale: a table, metrics, and what they show.

`python examples/ablation/run.py` runs what is missing and presents what is there; run it again after an interruption.
"""

import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from ablation_config import AblationConfig, read_ablation
from execute import Outcome, execute, unfinished
from plan import HERE, ROOT, Job, plan_jobs
from rich.console import Console

from vapo_megatron.errors import RunFailed, VapoError

console = Console(highlight=False, soft_wrap=True)


def show_plan(config: AblationConfig, jobs: list[Job], missing: list[Job]) -> None:
    """Say what will run, and for how long."""
    minutes = sum(job.seconds for job in missing) / config.workers / 60
    console.print(
        f"[bold]Ablation[/bold]: {len(config.rows)} rows x {len(config.seeds)} seeds "
        f"({', '.join(map(str, config.seeds))}), {config.steps} steps of 256 responses each, {config.workers} at once\n"
        f"{len(jobs)} jobs with tasks, cold starts and critics; {len(jobs) - len(missing)} are finished, "
        f"{len(missing)} to run: about {minutes:.0f} minutes on two idle cores"
    )
    for row in config.rows:
        changes = f"  {' '.join(row.overrides)}" if row.overrides else ""
        console.print(f"  {row.name:<28} preset {row.preset:<34} critic {row.critic:<12}{changes}")


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="over ablation.yaml, such as steps=12")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs, of the table and of the metrics")] = Path(
        "runs/ablation"
    ),
    only: Annotated[list[str] | None, typer.Option(help="a row to run; may be given again. VAPO is always run")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="say what would run, and end")] = False,
    docs: Annotated[
        bool, typer.Option("--docs", help="write docs/ablation.md and its images; needs every row at every seed")
    ] = False,
) -> None:
    """Run VAPO's ablation table and the family of algorithms with several seeds; resumes where it was stopped."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs as Ctrl-C does
    try:
        config = read_ablation(HERE / "ablation.yaml", overrides or [], only or [])
        jobs = plan_jobs(config, out)
        missing = unfinished(jobs)
        show_plan(config, jobs, missing)
        if plan:
            return
        outcome = execute(jobs, config.workers, out, console.print)
        present(config, out, jobs, outcome, docs, time.monotonic() - started)
    except VapoError as error:
        typer.echo(f"ablation: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("ablation: interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None


def present(config: AblationConfig, out: Path, jobs: list[Job], outcome: Outcome, docs: bool, seconds: float) -> None:
    """Write table and metrics of all that is finished, and the page where all is; fail where a job failed."""
    from metrics import save_ablation_figure, save_decay_figure
    from page import write_page
    from reward_decay import measure_decay
    from table import make_table, markdown, write_table

    failures = "; ".join(f"{name}: {why}" for name, why in outcome.failed.items())
    table = make_table(config, out, {job.name for job in jobs} - set(outcome.failed))
    if not table.rows:
        raise RunFailed(f"no row is finished: {failures}")
    decay = measure_decay()
    write_table(table, decay, out)
    console.print(f"\n{markdown(table)}")
    save_ablation_figure(table, out / "ablation.png")
    save_decay_figure(decay, out / "reward_decay.png")
    console.print(
        f"[bold green]{len(outcome.done)} jobs run, {len(outcome.skipped)} were finished before[/bold green] "
        f"({seconds / 60:.1f} minutes)\n  table    {out / 'table.md'}, {out / 'table.json'}\n"
        f"  metrics  {out / 'ablation.png'}, {out / 'reward_decay.png'}"
    )
    if outcome.failed:
        raise RunFailed(f"failed: {failures}")
    if docs:
        console.print(f"  page     {write_page(config, table, decay, out, ROOT / 'docs')}")


if __name__ == "__main__":
    typer.run(main)
