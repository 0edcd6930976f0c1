"""The whole life of a reasoning model on a laptop: cold start, value pretraining, VAPO, evaluation, export.

It runs the same commands as a person would, on the same program that trains on H100s; see README.md beside this file.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

console = Console(highlight=False)


def command(*arguments: str) -> None:
    """Run a command, showing it first; its failure is ours."""
    console.print(f"\n[bold]$ {escape(' '.join(arguments))}[/bold]", soft_wrap=True)
    code = subprocess.run([sys.executable, "-m", "vapo_megatron.cli", *arguments[1:]], cwd=ROOT).returncode
    if code:
        raise typer.Exit(code)


def main(
    seed: Annotated[int, typer.Option(help="of the task, the models and the runs")] = 1,
    out: Annotated[Path, typer.Option(help="folder for data, model and run directories")] = Path("runs/quickstart"),
    steps: Annotated[int, typer.Option(help="VAPO iterations")] = 40,
) -> None:
    """Train a tiny reasoning model end to end."""
    started = time.monotonic()
    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        if not (out / "task" / "model" / "config.json").is_file():
            console.print(f"{out} is not empty and no quickstart's folder: give another one with --out", soft_wrap=True)
            raise typer.Exit(2)
        shutil.rmtree(out)
    task = out / "task"
    console.print("[bold]1. A problem that has to be thought through, a tokenizer and a random model[/bold]")
    subprocess.run(
        [sys.executable, str(HERE / "make_task.py"), "--out", str(task), "--seed", str(seed)], cwd=ROOT, check=True
    )
    shared = [f"run.seed={seed}", f"run.root={out}"]

    console.print("\n[bold]2. Cold start: imitate imperfect solutions[/bold]")
    command(
        "vapo-megatron",
        "sft",
        str(HERE / "sft.yaml"),
        f"model.path={task / 'model'}",
        f"data.path={task / 'sft.jsonl'}",
        *shared,
    )

    console.print("\n[bold]3. Value pretraining, VAPO, evaluation on problems never trained on[/bold]")
    command(
        "vapo-megatron",
        "train",
        str(HERE / "vapo.yaml"),
        f"model.path={out / 'sft' / 'hf' / 'final' / 'actor'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
        f"run.steps={steps}",
        *shared,
    )

    rows = [json.loads(line) for line in (out / "vapo" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["evaluation/unseen_avg@4"] for row in rows if "evaluation/unseen_avg@4" in row]
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\n[bold green]Accuracy on unseen problems: {accuracy[0]:.3f} after the cold start, {accuracy[-1]:.3f} after "
        f"VAPO[/bold green] (seed {seed}, {minutes:.1f} minutes)\n"
        f"  picture   {out / 'vapo' / 'curves.png'}\n"
        f"  report    {out / 'vapo' / 'report.html'}\n"
        f"  samples   {out / 'vapo' / 'samples'}\n"
        f"  model     {out / 'vapo' / 'hf' / 'final' / 'actor'}  (a Hugging Face directory)\n"
        f"  charts    .venv/bin/tensorboard --logdir {out}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
