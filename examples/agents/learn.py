"""From a random model to an agent that uses its tool, on a laptop: cold start, value pretraining,
training, evaluation.

    python examples/agents/learn.py --method turn --seed 1
    python examples/agents/learn.py --method all --seed 1 --seed 2 --seed 3 --seed 4 --seed 5
    python examples/agents/learn.py --task compact --method all --seed 1 --seed 2 ...

The task is lookup.py's, or compact.py's, whose contexts are summarised. Methods differ in what
gives a turn its credit (VAPO by turns or by tokens, values by regression, GRPO), and for compact in
whether summaries carry loss ("masked": they do not). With several seeds the table has intervals.
Runs that have ended are not run again, and runs that were interrupted continue.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.ablation.intervals import interval, paired, shown  # noqa: E402
from examples.agents import compact, lookup  # noqa: E402
from vapo_megatron.monitoring.metrics import read_metrics  # noqa: E402
from vapo_megatron.signals import end_with_parent  # noqa: E402

ACCURACY, PRETRAINING = "evaluation/unseen_avg@4", "time/value_pretraining"
EPISODES = 256  # of a rollout
GRPO = (
    "algorithm.advantage.estimator=grpo",
    "algorithm.advantage.credit=token",
    "value_pretraining.enabled=false",
)
# A critic for nothing: values by regression on what the group's other episodes bring along.
REGRESSION = (
    "critic=null",
    "critic.kind=regression",
    "algorithm.advantage.calibration=trust",
    "value_pretraining.enabled=false",
)
MASKED = "algorithm.mask_function=examples.agents.compact:without_summaries"


@dataclass(frozen=True)
class Task:
    """What is learnt, and by which methods.

    Attributes:
        make: writes rows, demonstrations and a random model into a folder, by a seed.
        config: of `vapo-megatron train`, in this folder.
        methods: what each changes in the config. Rewards, clipping and learning rates are the same
            for all.
    """

    make: Callable[[Path, int], None]
    config: str
    methods: Mapping[str, tuple[str, ...]]


TASKS = {
    "lookup": Task(
        lookup.make_task,
        "lookup.yaml",
        {
            "turn": (),
            "token": ("algorithm.advantage.credit=token",),
            "regression": (*REGRESSION, "algorithm.advantage.credit=token"),
            # Trust is for credit by tokens.
            "regression_turn": (*REGRESSION, "algorithm.advantage.calibration=none"),
            "grpo": GRPO,
        },
    ),
    "compact": Task(
        compact.make_task,
        "compact.yaml",
        {
            "token": (),
            "token_masked": (MASKED,),
            "regression": REGRESSION,
            "grpo": GRPO,
            "grpo_masked": (*GRPO, MASKED),
        },
    ),
}


def command(name: str, config: str, *overrides: str) -> None:
    """Run a command of the program; its failure is ours."""
    arguments = [
        sys.executable,
        "-m",
        "vapo_megatron.cli",
        name,
        str(ROOT / "examples/agents" / config),
        *overrides,
    ]
    if code := subprocess.run(arguments, cwd=ROOT, preexec_fn=end_with_parent).returncode:
        raise typer.Exit(code)


def learn(
    task: Task, method: str, seed: int, out: Path, steps: int, overrides: list[str]
) -> list[dict[str, Any]]:
    """The metrics of a method's run, by step. A run that has not ended is run, or continued from
    its last checkpoint."""
    run = out / method
    if (
        (run / "metrics.jsonl").is_file()
        and (rows := read_metrics(run))
        and rows[-1]["step"] >= steps
    ):
        return rows
    data = out / "task"
    policy = out / "sft" / "hf" / "final" / "actor"
    shared = (f"run.seed={seed}", f"run.root={out}", "run.resume=auto")
    if not policy.is_dir():
        task.make(data, seed)
        command(
            "sft",
            "sft.yaml",
            f"model.path={data / 'model'}",
            f"data.path={data / 'sft.jsonl'}",
            *shared,
        )
    command(
        "train",
        task.config,
        f"model.path={policy}",
        f"data.train={data / 'train.jsonl'}",
        f"run.name={method}",
        f"data.eval=[{{name: unseen, path: {data / 'eval.jsonl'}, samples: 4}}]",
        f"run.steps={steps}",
        *task.methods[method],
        *shared,
        *overrides,
    )
    return read_metrics(run)


def table(runs: dict[str, dict[int, list[dict[str, Any]]]]) -> str:
    """Accuracy by evaluation, the difference from GRPO at the end, episodes and seconds; means over
    seeds."""
    lines = []
    last = {
        method: {seed: accuracies(rows)[-1] for seed, rows in by_seed.items()}
        for method, by_seed in runs.items()
    }
    for method, by_seed in runs.items():
        measured = [
            interval(column) for column in zip(*map(accuracies, by_seed.values()), strict=True)
        ]
        pretraining = [
            row[PRETRAINING] for rows in by_seed.values() for row in rows if PRETRAINING in row
        ]
        before = (
            f" + {sum(pretraining) / len(pretraining):.0f} s of value pretraining"
            if pretraining
            else ""
        )
        seconds = interval(
            [sum(row.get("time/step", 0.0) for row in rows) for rows in by_seed.values()]
        )
        cells = [
            f"{mean:.3f}" + (f" ± {half:.3f}" if len(by_seed) > 1 else "")
            for mean, half in measured
        ]
        cells.append("" if method == "grpo" else shown(paired(last[method], last.get("grpo", {}))))
        cells.append(f"{seconds.mean:.0f} s{before}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracies(rows: list[dict[str, Any]]) -> list[float]:
    """Of unseen problems, evaluation by evaluation; the first is the cold start's."""
    return [row[ACCURACY] for row in rows if ACCURACY in row]


def main(
    wanted: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="one of the task's: turn, token, regression, grpo, token_masked, ...; or all; "
            "repeatable; none: token",
        ),
    ] = None,
    task: Annotated[Literal["lookup", "compact"], typer.Option(help="what is learnt")] = "lookup",
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="of the task, the models and the runs; repeatable; none: 1"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder for data, model and runs; what is in it is used again; default: "
            "runs/agents or runs/agents_compact"
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="rollouts of 256 episodes that the policy is trained on")
    ] = 20,
    at_once: Annotated[int, typer.Option(min=1, help="seeds that are run at the same time")] = 2,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")
    ] = None,
) -> None:
    """Train tiny agents end to end, and print their accuracy by episodes."""
    learnt = TASKS[task]
    methods = wanted or ["token"]
    for method in methods:
        if method != "all" and method not in learnt.methods:
            known = ", ".join((*learnt.methods, "all"))
            typer.echo(f"--method {method} with --task {task}: expected some of: {known}", err=True)
            raise typer.Exit(2)
    if "all" in methods:
        methods = list(learnt.methods)
    folder = out or Path("runs/agents" if task == "lookup" else f"runs/agents_{task}")
    runs: dict[str, dict[int, list[dict[str, Any]]]] = {name: {} for name in methods}

    def learn_seed(seed: int) -> None:
        for name in methods:
            place = (folder / f"seed{seed}").resolve()
            runs[name][seed] = learn(learnt, name, seed, place, steps, overrides or [])
            for row in runs[name][seed]:
                if ACCURACY in row:
                    typer.echo(
                        f"{name}, seed {seed}, step {row['step']}: {row[ACCURACY]:.3f} of unseen "
                        "problems"
                    )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(learn_seed, seeds or [1]))
    evaluated = [
        row["step"] * EPISODES for row in runs[methods[0]][(seeds or [1])[0]] if ACCURACY in row
    ]
    heads = [f"after {episodes:,} episodes" if episodes else "cold start" for episodes in evaluated]
    heads += ["less GRPO at the end", "training"]
    typer.echo(f"\n| method | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}\n{table(runs)}")


if __name__ == "__main__":
    typer.run(main)
