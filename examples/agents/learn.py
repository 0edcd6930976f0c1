"""From a random model to an agent that uses its tool, on a laptop: cold start, value pretraining, training, evaluation.

    python examples/agents/learn.py --method turn --seed 1

The task is lookup.py's. Methods differ in what gives a turn its credit: VAPO by turns, VAPO by tokens, GRPO.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.agents.lookup import make_task  # noqa: E402
from vapo_megatron.monitoring.metrics import read_metrics  # noqa: E402
from vapo_megatron.signals import end_with_parent  # noqa: E402

Method = Literal["turn", "token", "grpo"]
# Of the methods, what differs from lookup.yaml. Rewards, clipping and learning rates are the same for all.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "turn": (),
    "token": ("algorithm.advantage.credit=token",),
    "grpo": (
        "algorithm.advantage.estimator=grpo",
        "algorithm.advantage.credit=token",
        "value_pretraining.enabled=false",
    ),
}


def command(name: str, config: str, *overrides: str) -> None:
    """Run a command of the program; its failure is ours."""
    arguments = [sys.executable, "-m", "vapo_megatron.cli", name, str(ROOT / "examples/agents" / config), *overrides]
    if code := subprocess.run(arguments, cwd=ROOT, preexec_fn=end_with_parent).returncode:
        raise typer.Exit(code)


def main(
    method: Annotated[Method, typer.Option(help="what gives a turn its credit")] = "turn",
    seed: Annotated[int, typer.Option(help="of the task, the models and the runs")] = 1,
    out: Annotated[Path, typer.Option(help="folder for data, model and runs; a cold start in it is used again")] = Path(
        "runs/agents"
    ),
    steps: Annotated[int, typer.Option(help="rollouts of 256 episodes that the policy is trained on")] = 20,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
) -> None:
    """Train a tiny agent end to end, and print its accuracy by episodes."""
    out = (out / f"seed{seed}").resolve()
    task, policy = out / "task", out / "sft" / "hf" / "final" / "actor"
    shared = (f"run.seed={seed}", f"run.root={out}")
    if not policy.is_dir():
        make_task(task, seed)
        command("sft", "sft.yaml", f"model.path={task / 'model'}", f"data.path={task / 'sft.jsonl'}", *shared)
    command(
        *("train", "lookup.yaml", f"model.path={policy}", f"data.train={task / 'train.jsonl'}", f"run.name={method}"),
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
        *(f"run.steps={steps}", *OVERRIDES[method], *shared, *(overrides or [])),
    )
    rows = read_metrics(out / method)
    for row in rows:
        if (accuracy := row.get("evaluation/unseen_avg@4")) is not None:
            typer.echo(f"{method}, seed {seed}, step {row['step']}: {accuracy:.3f} of unseen problems")


if __name__ == "__main__":
    typer.run(main)
