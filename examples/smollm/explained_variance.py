"""What a critic for nothing explains of a pretrained model that reasons in several steps.

    python -m examples.smollm.explained_variance [--seed 21] [--out runs/smollm_values]

SmolLM2-135M-Instruct learns to work out `(a + b) * c - d` step by step from 30 updates of written
solutions, and answers ten steps of 16 problems x 8 responses at fixed weights. The page that
`vapo-megatron critic` writes says what each feature of `critic.kind: regression` explains of them,
with coefficients of past steps alone. What was made before is used again. Run from the repository's
root.
"""

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from examples.quickstart.run import command
from examples.smollm.run import PACKAGE

HERE = Path(__file__).resolve().parent
TRAINED_ON = 2400
SOLUTIONS = 1000
# Numbers are from 2 to 9. A fifth of all problems is kept for evaluation.
HELD_OUT_SHARE = 5
HELD_OUT = 160


def problems(count: int, seed: int, held_out: bool) -> list[tuple[int, int, int, int]]:
    """Different problems `(a + b) * c - d`, either of those held out or of the others."""
    numbers = range(2, 10)
    every = [(a, b, c, d) for a in numbers for b in numbers for c in numbers for d in numbers]
    side = [problem for problem in every if (_mixed(*problem) % HELD_OUT_SHARE == 0) == held_out]
    return random.Random(seed).sample(side, count)


def _mixed(a: int, b: int, c: int, d: int) -> int:
    return 7 * a + 5 * b + 3 * c + d


def solution(a: int, b: int, c: int, d: int) -> str:
    """The steps in words."""
    total = a + b
    product = total * c
    result = product - d
    return (
        f"{a} + {b} = {total}. {total} * {c} = {product}. {product} - {d} = {result}. "
        f"The answer is {result}."
    )


def write_task(folder: Path, seed: int) -> None:
    """Write sft.jsonl, train.jsonl and held_out.jsonl."""
    trained_on = problems(TRAINED_ON, seed, held_out=False)
    files = {
        "sft": [
            {"problem": _question(*problem), "response": solution(*problem)}
            for problem in trained_on[:SOLUTIONS]
        ],
        "train": [_with_answer(*problem) for problem in trained_on],
        "held_out": [_with_answer(*p) for p in problems(HELD_OUT, seed + 1, held_out=True)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def _question(a: int, b: int, c: int, d: int) -> str:
    return f"({a} + {b}) * {c} - {d}"


def _with_answer(a: int, b: int, c: int, d: int) -> dict[str, str]:
    return {"problem": _question(a, b, c, d), "answer": str((a + b) * c - d)}


def main(
    seed: Annotated[int, typer.Option(help="of problems, cold start and responses")] = 21,
    out: Annotated[Path, typer.Option(help="folder for everything")] = Path("runs/smollm_values"),
    steps: Annotated[int, typer.Option(min=2, help="of 128 responses at fixed weights")] = 10,
    model: Annotated[
        Path | None, typer.Option(help="a directory made by prepare-model before; none: make it")
    ] = None,
) -> None:
    """Cold start, responses, table."""
    out = out.resolve()
    model = (model or out / "model").resolve()
    if not (model / "origin.json").is_file():
        command("vapo-megatron", "prepare-model", PACKAGE, "--out", str(model))
    task = out / "task"
    write_task(task, seed)
    cold_start = out / f"sft_{seed}"
    if not (cold_start / "hf" / "final").is_dir():
        command(
            "vapo-megatron",
            "sft",
            str(HERE / "sft.yaml"),
            f"model.path={model}",
            f"data.path={task / 'sft.jsonl'}",
            f"run.root={out}",
            f"run.name={cold_start.name}",
            f"run.seed={seed}",
            "run.resume=auto",
        )
    command(
        "vapo-megatron",
        "critic",
        str(HERE / "values.yaml"),
        f"model.path={cold_start / 'hf' / 'final' / 'actor'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: held_out, path: {task / 'held_out.jsonl'}, samples: 8}}]",
        f"run.root={out}",
        f"run.name=values_{seed}",
        f"run.seed={seed}",
        f"critic_probes.seed={seed}",
        f"critic_probes.steps={steps}",
    )


if __name__ == "__main__":
    typer.run(main)
