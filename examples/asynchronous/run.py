"""The quickstart with rollouts that work ahead of the trainer, beside the synchronous run, paired
by seed.

    python -m examples.asynchronous.run [--seeds 1 2 3 4 5] [--only MODE ...] [--out
    runs/asynchronous] [--json FILE]

Each seed has a task, a cold start and a critic of its own, which all modes start from; one rank and
one engine, a core each. What is finished is not run again, what was cut off goes on. At the end it
prints the accuracy on unseen problems, what it differs by from the synchronous run of the same seed
(95 % intervals), and after how many steps, and how many seconds of steps, the accuracy first was
0.90. Run from the repository's root.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from examples.ablation.intervals import interval, paired, shown
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent

QUICKSTART = Path("examples/quickstart")
ACCURACY, GOAL = "evaluation/unseen_avg@4", 0.90
TIS = "algorithm.importance_sampling.kind=tis"
VTRACE = "algorithm.advantage.off_policy=vtrace"
MODES = {
    "synchronous": (TIS,),
    "staleness 1": (TIS, "rollout.asynchronous.max_staleness=1"),
    "staleness 2": (TIS, "rollout.asynchronous.max_staleness=2"),
    "staleness 8": (TIS, "rollout.asynchronous.max_staleness=8"),
    "staleness 8, V-trace": (TIS, VTRACE, "rollout.asynchronous.max_staleness=8"),
}
ONE_RANK = ("cluster.ranks=1", "actor.layout.tp=1")


def vapo_megatron(*arguments: object) -> None:
    """Run the program; its failure is ours."""
    command = [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", *map(str, arguments)]
    if code := subprocess.run(command, preexec_fn=end_with_parent).returncode:
        raise SystemExit(code)


def prepare(folder: Path, seed: int) -> None:
    """Task, cold start and critic of a seed."""
    task = folder / "task"
    if not (task / "eval.jsonl").is_file():
        subprocess.run(
            [
                sys.executable,
                str(QUICKSTART / "make_task.py"),
                "--out",
                str(task),
                "--seed",
                str(seed),
            ],
            check=True,
        )
    shared = (f"run.root={folder}", f"run.seed={seed}", "run.resume=auto", *ONE_RANK)
    if not (folder / "sft" / "hf" / "final").is_dir():
        model = (f"model.path={task / 'model'}", f"data.path={task / 'sft.jsonl'}")
        vapo_megatron("sft", QUICKSTART / "sft.yaml", *model, *shared)
    if not (folder / "critic" / "hf" / "final").is_dir():
        train(folder, seed, "critic", ["run.steps=1"])


def train(folder: Path, seed: int, name: str, overrides: list[str]) -> None:
    """A run of a seed."""
    task = folder / "task"
    vapo_megatron(
        "train",
        QUICKSTART / "vapo.yaml",
        f"model.path={folder / 'sft' / 'hf' / 'final' / 'actor'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
        f"run.root={folder}",
        f"run.name={name}",
        f"run.seed={seed}",
        "run.resume=auto",
        *ONE_RANK,
        "critic.layout.tp=1",
        *overrides,
    )


def read(run_dir: Path) -> dict[str, Any]:
    """Accuracy at each evaluation, steps and seconds until it was GOAL; seconds count steps, not
    evaluations."""
    accuracy, steps, seconds, reached = [], 0, 0.0, None
    for row in read_metrics(run_dir):
        if "time/step" in row:
            steps, seconds = steps + 1, seconds + row["time/step"]
        if ACCURACY in row:
            accuracy.append((steps, row[ACCURACY]))
            if reached is None and row[ACCURACY] >= GOAL:
                reached = (steps, seconds)
    return {"accuracy": accuracy, "reached": reached}


def table(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Lines of Markdown, one a mode."""
    lines = [
        "| | seeds | final accuracy | less synchronous | mean of evaluations, less | steps to "
        f"{GOAL} | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    final, mean = (
        {
            mode: {seed: of(run["accuracy"]) for seed, run in runs.items()}
            for mode, runs in found.items()
        }
        for of in (
            lambda rows: rows[-1][1],
            lambda rows: float(np.mean([value for _, value in rows])),
        )
    )
    for mode, runs in found.items():
        reached = [run["reached"] for run in runs.values() if run["reached"]]
        steps, seconds = (
            f"{np.median([pair[i] for pair in reached]):.0f}" if reached else "–" for i in (0, 1)
        )
        kept = interval(list(final[mode].values()))
        less = [
            shown(paired(by[mode], by["synchronous"])) if mode != "synchronous" else ""
            for by in (final, mean)
        ]
        lines.append(
            f"| {mode} | {len(runs)} | {kept.mean:.3f} ± {kept.half:.3f} | {less[0]} | {less[1]} | "
            f"{steps} ({len(reached)} of {len(runs)}) | {seconds} |"
        )
    return lines


def main() -> None:
    """Run what is missing, seed by seed; print the table of what is there."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    arguments.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    arguments.add_argument("--json", type=Path, help="file to write the results to")
    arguments.add_argument("--as-is", action="store_true", help="run nothing, print what is there")
    given = arguments.parse_args()
    found: dict[str, dict[int, dict[str, Any]]] = {mode: {} for mode in given.only}
    for seed in given.seeds:
        folder = given.out.resolve() / f"seed{seed}"
        critic = folder / "critic" / "hf" / "value_pretrained" / "critic"
        if not given.as_is:
            prepare(folder, seed)
        for mode in given.only:
            run_dir = folder / mode.replace(" ", "_").replace(",", "")
            done = (run_dir / "hf" / "final").is_dir()
            if not done and not given.as_is:
                pretrained = ["value_pretraining.enabled=false", "critic.init=value_checkpoint"]
                pretrained.append(f"critic.init_path={critic}")
                steps = [f"run.steps={given.steps}", "evaluation.every=5"]
                train(folder, seed, run_dir.name, [*pretrained, *steps, *MODES[mode]])
            if done or not given.as_is:
                found[mode][seed] = read(run_dir)
    print("\n".join(table({mode: runs for mode, runs in found.items() if runs})))
    if given.json:
        with atomic_write(given.json) as out:
            json.dump(found, out, indent=1)


if __name__ == "__main__":
    main()
