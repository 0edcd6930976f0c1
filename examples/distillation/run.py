"""A small student learns the quickstart's task from a teacher, from the verifier, and from both.

    python -m examples.distillation.run [--seed 1] [--steps 120] [--sft-steps 300] [--responses 256]
        [--problems 160] [--out runs/distillation]

The teacher is the quickstart's model, fine-tuned on solutions without guesses or slips. The student
has half its width and the quickstart's cold start. Its learning rate falls to almost nothing over
the run, without which it stays well below its teacher (docs/algorithms.md). Runs that are finished
are not repeated.
"""

import random
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from examples.quickstart.make_task import (
    CHAT_TEMPLATE,
    LONGEST_SEQUENCE,
    WORDS,
    cold_start_response,
    make_task,
    single_cycle,
    split,
)
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent
from vapo_megatron.weights.tiny import save_tiny_model, word_tokenizer

QUICKSTART = Path("examples/quickstart")
ACCURACY = "evaluation/unseen_avg@4"
ROWS = 25_600
MINIBATCH = 64
ONE_RANK = ("cluster.ranks=1", "actor.layout.tp=1")
NO_REWARD, REWARD = (("reward.incorrect=0", f"reward.correct={correct}") for correct in (0, 1))
MODES = {
    "teacher alone": ("preset=distill", *NO_REWARD),
    "verifier alone": ("preset=grpo",),
    "teacher and verifier": ("preset=distill", *REWARD),
}


def vapo_megatron(*arguments: object) -> None:
    """Run the program; its failure is ours."""
    command = [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", *map(str, arguments)]
    if code := subprocess.run(command, preexec_fn=end_with_parent).returncode:
        raise typer.Exit(code)


def write_task(folder: Path, seed: int) -> None:
    """The quickstart's task, solutions without guesses or slips for the teacher, and the student's
    smaller model."""
    make_task(folder / "task", seed, ROWS)
    rng = random.Random(seed)
    successor = single_cycle(rng)
    pairs, rng = split(successor, rng)[0], random.Random(f"{seed}/teacher")
    chosen = [rng.choice(pairs) for _ in range(ROWS)]
    solutions = (
        cold_start_response(successor, pair, rng, guesses=0.0, slips=0.0) for pair in chosen
    )
    rows = zip(range(ROWS), chosen, solutions, strict=True)
    write_rows(
        folder / "task" / "clean.jsonl",
        (
            {"id": f"clean-{n:05d}", "problem": f"s{x} c{k}", "response": response}
            for n, (x, k), response in rows
        ),
    )
    tokenizer = word_tokenizer(WORDS, LONGEST_SEQUENCE, CHAT_TEMPLATE)
    narrow = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    shape = TinyModel(
        vocab_size=len(tokenizer), max_positions=LONGEST_SEQUENCE, seed=seed, **narrow
    )
    save_tiny_model(shape, tokenizer, folder / "task" / "student")


def fine_tune(folder: Path, seed: int, name: str, model: str, data: str, steps: int) -> None:
    """Make a model of the task's folder imitate solutions."""
    if not (folder / name / "hf" / "final").is_dir():
        place = (f"run.root={folder}", f"run.name={name}", f"run.seed={seed}", "run.resume=auto")
        paths = (f"model.path={folder / 'task' / model}", f"data.path={folder / 'task' / data}")
        vapo_megatron(
            "sft", QUICKSTART / "sft.yaml", *ONE_RANK, *place, *paths, f"data.steps={steps}"
        )


def train(folder: Path, seed: int, name: str, problems: int, *overrides: str) -> dict[int, float]:
    """A run of the quickstart's config; its accuracy on unseen problems by step."""
    task, run_dir = folder / "task", folder / name.replace(" ", "_")
    if not (run_dir / "hf" / "final").is_dir():
        vapo_megatron(
            "train",
            QUICKSTART / "vapo.yaml",
            *ONE_RANK,
            "critic.layout.tp=1",
            "value_pretraining.enabled=false",
            f"algorithm.update.minibatch_size={MINIBATCH}",
            f"run.root={folder}",
            f"run.name={run_dir.name}",
            f"run.seed={seed}",
            "run.resume=auto",
            f"data.train={task / 'train.jsonl'}",
            f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4, limit: "
            f"{problems}}}]",
            *overrides,
        )
    return {int(row["step"]): row[ACCURACY] for row in read_metrics(run_dir) if ACCURACY in row}


def main(
    seed: Annotated[int, typer.Option(help="of the task, the models and the runs")] = 1,
    steps: Annotated[int, typer.Option(help="rollouts")] = 120,
    responses: Annotated[int, typer.Option(help="of a rollout, 8 to a prompt")] = 256,
    problems: Annotated[
        int, typer.Option(help="unseen ones in an evaluation, with 4 responses each")
    ] = 160,
    sft_steps: Annotated[
        int, typer.Option(help="steps of fine-tuning of teacher and student")
    ] = 300,
    rate: Annotated[
        float, typer.Option(help="the student's learning rate, falling to 2e-5 as a cosine")
    ] = 1.5e-3,
    out: Annotated[Path, typer.Option(help="folder for data, models and runs")] = Path(
        "runs/distillation"
    ),
) -> None:
    """Train the teacher and the student, then the student in three ways; print accuracy by
    responses."""
    folder = out.resolve() / f"seed{seed}"
    if not (folder / "task" / "student").is_dir():
        write_task(folder, seed)
    fine_tune(folder, seed, "teacher", "model", "clean.jsonl", sft_steps)
    fine_tune(folder, seed, "student", "student", "sft.jsonl", sft_steps)
    teacher, student = (
        f"{folder / name / 'hf' / 'final' / 'actor'}" for name in ("teacher", "student")
    )
    prompts = f"batch.prompts_per_step={responses // 8}"
    # Nothing is learnt at a rate this small: the accuracy before training is the teacher's.
    still = ("preset=grpo", "run.steps=1", "actor.optimizer.lr=1e-12", "evaluation.every=1")
    goal = train(
        folder, seed, "teacher accuracy", problems, f"model.path={teacher}", prompts, *still
    )[0]
    updates = max(steps * responses // MINIBATCH, 8)  # more than those of the warm-up
    optimizer = {"lr": rate, "min_lr": min(rate, 2e-5), "decay": "cosine", "decay_steps": updates}
    schedule = [f"actor.optimizer.{key}={value}" for key, value in optimizer.items()]
    curves = {}
    for name, overrides in MODES.items():
        of_teacher = (f"algorithm.kl.reference_path={teacher}",) if "teacher" in name else ()
        pace = (prompts, f"run.steps={steps}", f"evaluation.every={max(1, steps // 12)}", *schedule)
        curves[name] = train(
            folder, seed, name, problems, f"model.path={student}", *overrides, *of_teacher, *pace
        )
    print(f"| responses | {' | '.join(curves)} |\n|---|{'---|' * len(curves)}")
    for step in next(iter(curves.values())):
        print(
            f"| {responses * step:,} | "
            f"{' | '.join(f'{curve[step]:.3f}' for curve in curves.values())} |"
        )
    print(f"\nThe teacher is right in {goal:.3f} of its responses. Runs: {folder}")


if __name__ == "__main__":
    typer.run(main)
