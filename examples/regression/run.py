"""Values by regression beside methods without a critic and critics of other kinds, on the
quickstart's task, paired by seed.

    python -m examples.regression.run [--seeds 11 12 13] [--only ROW ...] [--steps 24]
    [--set SECTION.KEY=VALUE ...] [--out runs/regression]

All runs start from one cold start, with one rank, one engine and 64 responses a step in one update.
Finished runs are not repeated, interrupted ones continue: --set, as for an actor of adapters, needs
an --out of its own. At the end it prints, with 95 % intervals
over seeds, the mean accuracy of rollouts from step 5 on, its difference from `reinforce_direct`
with the same seed, the accuracy on unseen problems, and the explained variance of the values. Run
from the repository's root.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from examples.ablation.intervals import interval, paired, shown
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent

QUICKSTART = Path("examples/quickstart")
ACCURACY = "evaluation/unseen_avg@4"
BASELINE = "reinforce_direct"
FIRST_STEP = 5
SINGLE = ("batch.prompts_per_step=64", "batch.samples_per_prompt=1")
GROUPS = ("batch.prompts_per_step=8", "batch.samples_per_prompt=8")
BOOTSTRAPPED = "algorithm.advantage.lambda_policy=length_adaptive"
ROWS = {
    "reinforce_direct": SINGLE,
    "reinforce_regression": SINGLE,
    "vapo_without_critic": GROUPS,
    "tempo": GROUPS,
    "vapo_regression": GROUPS,
    # The same values in GAE, with lambda at the presets' floor for responses as short as here.
    "reinforce_bootstrapped": (*SINGLE, BOOTSTRAPPED),
    "vapo_bootstrapped": (*GROUPS, BOOTSTRAPPED),
    # Critics of other kinds, at the learning rates of results/critic.md.
    "probe": (*SINGLE, "critic.kind=probe", "critic.optimizer.lr=1.0e-3"),
    "adapter": (*SINGLE, "critic.kind=adapter", "critic.optimizer.lr=2.0e-3"),
    "model": (*SINGLE, "critic.optimizer.lr=6.0e-4"),
}
# Of the rows that are not called by their preset.
PRESET = {
    "reinforce_bootstrapped": "reinforce_regression",
    "vapo_bootstrapped": "vapo_regression",
    "probe": "vapo_direct",
    "adapter": "vapo_direct",
    "model": "vapo_direct",
}
ONE_RANK = ("cluster.ranks=1", "actor.layout.tp=1")


def vapo_megatron(*arguments: object) -> None:
    """Run the program; its failure is ours."""
    command = [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", *map(str, arguments)]
    if code := subprocess.run(command, preexec_fn=end_with_parent).returncode:
        raise SystemExit(code)


def prepare(folder: Path) -> None:
    """The quickstart's task and cold start."""
    task = folder / "task"
    if not (task / "eval.jsonl").is_file():
        script = str(QUICKSTART / "make_task.py")
        subprocess.run([sys.executable, script, "--out", str(task), "--seed", "1"], check=True)
    if not (folder / "sft" / "hf" / "final").is_dir():
        vapo_megatron(
            "sft",
            QUICKSTART / "sft.yaml",
            f"model.path={task / 'model'}",
            f"data.path={task / 'sft.jsonl'}",
            f"run.root={folder}",
            "run.seed=1",
            "run.resume=auto",
            *ONE_RANK,
        )


def train(
    folder: Path,
    name: str,
    seed: int,
    steps: int,
    run_name: str | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """A run of a row; its directory. overrides: of the config, in a run named so."""
    run_dir = folder / (run_name or f"{name}_{seed}")
    metrics = read_metrics(run_dir) if run_dir.is_dir() else []
    is_finished = (run_dir / "hf" / "final").is_dir() and metrics[-1]["step"] >= steps
    if not is_finished:
        task = folder / "task"
        vapo_megatron(
            "train",
            QUICKSTART / "vapo.yaml",
            # The example's critic has a layout, which a critic without a model has not.
            "critic=null",
            f"preset={PRESET.get(name, name)}",
            f"model.path={folder / 'sft' / 'hf' / 'final' / 'actor'}",
            f"data.train={task / 'train.jsonl'}",
            f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
            "value_pretraining=null",
            "value_pretraining.enabled=false",
            "actor.optimizer.lr=1.2e-3",
            "evaluation.before_training=false",
            f"run.root={folder}",
            f"run.name={run_dir.name}",
            f"run.seed={seed}",
            f"run.steps={steps}",
            "run.resume=auto",
            *ONE_RANK,
            *ROWS[name],
            *overrides,
        )
    return run_dir


def read(run_dir: Path) -> dict[str, float]:
    """What the table shows of a run."""
    rows = [row for row in read_metrics(run_dir) if row["step"] >= FIRST_STEP]
    explained = [row[names.EXPLAINED_VARIANCE] for row in rows if names.EXPLAINED_VARIANCE in row]
    result = {
        "mean": fmean(row[names.ACCURACY] for row in rows if names.ACCURACY in row),
        "unseen": next(row[ACCURACY] for row in reversed(rows) if ACCURACY in row),
        "seconds": median(row[names.STEP_TIME] for row in rows if names.STEP_TIME in row),
    }
    return result | ({"explained": fmean(explained)} if explained else {})


def table(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """Lines of Markdown, one a row."""
    lines = [
        f"| preset or critic | mean accuracy from step {FIRST_STEP} on | less {BASELINE} "
        "| unseen problems | explained |",
        "|---|---|---|---|---|",
    ]
    means = {
        name: {seed: run["mean"] for seed, run in runs.items()} for name, runs in found.items()
    }
    for name, runs in found.items():
        mean = interval(list(means[name].values()))
        less = "–" if name == BASELINE else shown(paired(means[name], means.get(BASELINE, {})))
        unseen = " ".join(f"{run['unseen']:.3f}" for run in runs.values())
        shares = [run["explained"] for run in runs.values() if "explained" in run]
        explained = f"{fmean(shares):.2f}" if shares else "–"
        lines.append(f"| `{name}` | {mean.mean:.3f} | {less} | {unseen} | {explained} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, seed by seed; print the table of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/regression"))
    parser.add_argument("--as-is", action="store_true", help="run nothing, print what is there")
    given = parser.parse_args(arguments)
    folder = given.out.resolve()
    if not given.as_is:
        prepare(folder)
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in given.only}
    for seed in given.seeds:
        for name in given.only:
            run_dir = folder / f"{name}_{seed}"
            if not given.as_is:
                run_dir = train(folder, name, seed, given.steps, overrides=given.set)
            if (run_dir / "hf" / "final").is_dir():
                found[name][seed] = read(run_dir)
    print("\n".join(table({name: runs for name, runs in found.items() if runs})))


if __name__ == "__main__":
    main()
