"""Methods side by side on a pretrained model: what a critic explains, and what it brings.

    python -m examples.smollm.methods        # reinforce_direct and vapo_regression, two seeds each
    python -m examples.smollm.methods grpo:1 probe:1 critic:1 tether:1
    [--gguf FIRST_HALF --gguf SECOND_HALF] [--model DIR] [--budget SECONDS] [--out FOLDER]

SmolLM2-135M-Instruct learns to work out `(a + b) * c - d` step by step from a short cold start;
then each METHOD:SEED takes 60 steps of 256 responses from there. On a GPU up to four of them share
the card; on CPUs one runs after another, at a tenth of the size, which shows that everything works
and nothing about a method. What is finished is not run again. With --budget those that still run at
its end are stopped and count as far as they came.

OUT/results.md has accuracy by responses and by seconds, explained variance beside the free
baselines, and seconds by phase beside those planned; OUT/manifest.json the digests of weights and
prompts, commit, versions and card. Run from the repository's root.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from examples.quickstart.run import command
from examples.smollm.explained_variance import write_task
from examples.smollm.run import PACKAGE
from tools.gpu_check.__main__ import gpu_name
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = HERE / "methods.yaml"
DEFAULT = ("reinforce_direct:1", "vapo_regression:1", "reinforce_direct:2", "vapo_regression:2")
# One response per prompt: as many prompts as a step has responses.
ALONE = "batch.samples_per_prompt=1"
NO_KL = (
    "algorithm.kl.placement=none",
    "algorithm.kl.coef=0",
    "algorithm.kl.replace_reference_every=null",
)
METHODS: dict[str, tuple[str, ...]] = {
    "reinforce_direct": ("preset=reinforce_direct", ALONE),
    "without_critic": ("preset=vapo_without_critic",),
    "vapo_regression": ("preset=vapo_regression",),
    "tempo": ("preset=tempo", *NO_KL),
    "grpo": ("preset=grpo", *NO_KL),
    "probe": ("preset=vapo_direct", ALONE, "critic={kind: probe, optimizer: {lr: 1.0e-3}}"),
    "critic": ("preset=vapo_direct", ALONE, "critic.optimizer.lr=2.0e-5"),
    "tether": ("preset=tether", "value_pretraining.enabled=false", "critic.optimizer.lr=2.0e-5"),
}
# Runs that share a card, and what each takes of its memory.
AT_ONCE = 4
ON_GPU = ("model.dtype=bfloat16", "rollout.mem_fraction_static=0.12")
ON_CPU = ("model.dtype=float32", "cluster.cpu_threads=2", "rollout.cpu_threads=2")
# Seconds that a run has to save and end once it is asked to.
LAST_SECONDS = 45.0

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cold start and of every run."""

    cold_start: int  # updates of 16 solutions
    steps: int
    groups: int  # of eight responses
    eval_samples: int


GPU_SIZES = Sizes(cold_start=30, steps=60, groups=32, eval_samples=4)
CPU_SIZES = Sizes(cold_start=3, steps=6, groups=3, eval_samples=1)


def parse(run: str) -> tuple[str, int]:
    """METHOD:SEED.

    Raises:
        BadInput: it is none of a known method.
    """
    method, _, seed = run.partition(":")
    if method not in METHODS or not seed.isdecimal():
        raise BadInput(f"{run}: expected METHOD:SEED, METHOD one of {', '.join(METHODS)}")
    return method, int(seed)


def overrides(method: str, seed: int, sizes: Sizes, on_gpu: bool, out: Path) -> list[str]:
    """The command line of a run over methods.yaml."""
    task = out / "task"
    settings = METHODS[method]
    prompts = sizes.groups * 8 if ALONE in settings else sizes.groups
    held_out = f"{{name: held_out, path: {task / 'held_out.jsonl'}, samples: {sizes.eval_samples}}}"
    return [
        *settings,
        *(ON_GPU if on_gpu else ON_CPU),
        f"batch.prompts_per_step={prompts}",
        f"algorithm.update.minibatch_size={sizes.groups * 4}",
        f"model.path={out / 'sft' / 'hf' / 'final' / 'actor'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{held_out}]",
        f"evaluation.every={sizes.steps}",
        f"run.root={out}",
        f"run.name={method}_{seed}",
        f"run.seed={seed}",
        f"run.steps={sizes.steps}",
        "run.resume=auto",
    ]


def join(parts: Sequence[Path], file: Path) -> None:
    """The parts of a file that was carried in pieces, one behind the other."""
    with atomic_write(file, "wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)


def sha256(file: Path) -> str:
    """Of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def prepare(out: Path, model: Path, gguf: Sequence[Path], sizes: Sizes, on_gpu: bool) -> None:
    """Model, problems and cold start, as far as they are missing."""
    if not (model / "origin.json").is_file():
        source = PACKAGE
        if gguf:
            file = out / "smollm2.gguf"
            join(gguf, file)
            source = str(file)
        command("vapo-megatron", "prepare-model", source, "--out", str(model))
    task = out / "task"
    write_task(task, seed=1)
    cold_start = out / "sft"
    if not (cold_start / "hf" / "final").is_dir():
        decay = "actor.optimizer.decay_steps"
        command(
            "vapo-megatron",
            "sft",
            str(HERE / "sft.yaml"),
            f"model.path={model}",
            f"data.path={task / 'sft.jsonl'}",
            f"run.root={out}",
            "run.name=sft",
            "run.resume=auto",
            f"data.steps={sizes.cold_start}",
            f"{decay}={sizes.cold_start + 1}",
            "actor.optimizer.warmup_steps=1",
            "model.dtype=float32" if not on_gpu else "model.dtype=bfloat16",
        )


def run_all(
    commands: Mapping[str, Sequence[str]], at_once: int, logs: Path, ends: float | None
) -> dict[str, int]:
    """Exit codes of commands by name; so many run at a time. At `ends`, a time of time.monotonic(),
    those that run are asked to stop and the others left out."""
    waiting = dict(commands)
    running: dict[str, subprocess.Popen[bytes]] = {}
    codes: dict[str, int] = {}
    logs.mkdir(parents=True, exist_ok=True)
    asked = False
    while waiting or running:
        now = time.monotonic()
        if ends is not None and now > ends:
            waiting.clear()
            _stop(running, asked, now > ends + LAST_SECONDS)
            asked = True
        while waiting and len(running) < at_once:
            name = next(iter(waiting))
            with (logs / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    list(waiting.pop(name)),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_parent,
                )
            console.print(f"{name}: started, {logs / name}.log")
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            codes[name] = running.pop(name).returncode
            console.print(f"{name}: ended with code {codes[name]}")
    return codes


def _stop(running: Mapping[str, subprocess.Popen[bytes]], asked: bool, late: bool) -> None:
    for process in running.values():
        if not asked:
            process.send_signal(signal.SIGTERM)
        elif late:
            process.kill()


def figures(run_dir: Path, responses_per_step: int) -> dict[str, Any]:
    """What a run has shown so far.

    Returns:
        accuracy of each step; `held_out`, accuracy by step of its evaluation; means of the second
        half of the steps of what values explain; median seconds of each phase.
    """
    rows = read_metrics(run_dir)
    steps = [row for row in rows if row["step"] > 0]
    half = steps[len(steps) // 2 :]
    explained = {}
    for name in (
        names.EXPLAINED_VARIANCE,
        names.EXPLAINED_CALIBRATED,
        names.BASELINE_LOO,
        names.BASELINE_POSITION,
        names.TRUST,
    ):
        measured = [row[name] for row in half if name in row]
        if measured:
            explained[name] = fmean(measured)
    phases = sorted({name for row in steps for name in row if name.startswith(names.TIME)})
    return {
        "accuracy": [row[names.ACCURACY] for row in steps],
        "responses": responses_per_step * len(steps),
        "seconds": sum(row[names.STEP_TIME] for row in steps),
        "held_out": {
            str(int(row["step"])): row[name]
            for row in rows
            for name in row
            if name.startswith(f"{names.EVALUATION}held_out_avg")
        },
        "explained": explained,
        "phases": {
            name.removeprefix(names.TIME): median(row.get(name, 0.0) for row in steps)
            for name in phases
        },
    }


def planned(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds of each phase by `vapo-megatron plan`; empty where it cannot say."""
    given = [each for each in arguments if not each.startswith("run.")]
    line = [sys.executable, "-m", "vapo_megatron.cli", "plan", str(CONFIG), *given, "--json"]
    asked = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    try:
        seconds = json.loads(asked.stdout)["seconds"]
    except (ValueError, KeyError):
        return {}
    return {**seconds["phases"], "step": seconds["step"]}


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: a row a run, then its seconds by phase beside the plan's."""
    lines = [
        "| run | responses | seconds | accuracy, all steps | last third | held out | explained | "
        "calibrated | siblings | position | trust |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    explained = (
        names.EXPLAINED_VARIANCE,
        names.EXPLAINED_CALIBRATED,
        names.BASELINE_LOO,
        names.BASELINE_POSITION,
        names.TRUST,
    )
    for name, run in results.items():
        accuracy = run["accuracy"]
        if not accuracy:
            lines.append(f"| {name} | no step ended |" + " |" * 9)
            continue
        last = accuracy[-max(1, len(accuracy) // 3) :]
        held_out = " -> ".join(f"{value:.3f}" for value in run["held_out"].values())
        cells = [
            str(run["responses"]),
            f"{run['seconds']:.0f}",
            f"{fmean(accuracy):.3f}",
            f"{fmean(last):.3f}",
            held_out or "–",
            *(
                f"{run['explained'][key]:.3f}" if key in run["explained"] else "–"
                for key in explained
            ),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Seconds of a step by phase, median, planned in brackets:", ""]
    for name, run in results.items():
        plan = run.get("planned", {})
        parts = [
            f"{phase} {seconds:.2f}" + (f" ({plan[phase]:.2f})" if phase in plan else "")
            for phase, seconds in run["phases"].items()
            if seconds >= 0.005
        ]
        lines.append(f"- {name}: {', '.join(parts)}")
    return lines


def main(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[METHOD:SEED]...", help=", ".join(METHODS))
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for everything")] = Path("runs/smollm_methods"),
    model: Annotated[
        Path | None, typer.Option(help="a directory made by prepare-model before; none: make it")
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(help="a GGUF file, or its pieces in order, in place of the package"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="of each run")] = None,
    budget: Annotated[float | None, typer.Option(help="seconds, from the start")] = None,
) -> None:
    """Cold start, then every method, then the tables."""
    began = time.monotonic()
    out = out.resolve()
    model = (model or out / "model").resolve()
    try:
        wanted = {run: parse(run) for run in runs or DEFAULT}
    except BadInput as error:
        console.print(escape(str(error)))
        raise typer.Exit(2) from None
    card = gpu_name(dict(os.environ))
    on_gpu = bool(card)
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    if steps is not None:
        sizes = Sizes(sizes.cold_start, steps, sizes.groups, sizes.eval_samples)
    if not on_gpu:
        console.print("No GPU: a tenth of the size, one run after another. No figures of methods.")
    prepare(out, model, gguf or [], sizes, on_gpu)
    manifest = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card or None,
        "sizes": vars(sizes),
        "weights": sha256(out / "sft" / "hf" / "final" / "actor" / "model.safetensors"),
        "prompts": {
            name: sha256(out / "task" / f"{name}.jsonl") for name in ("sft", "train", "held_out")
        },
        "facts": environment_facts(),
    }
    with atomic_write(out / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")

    lines = {
        name: overrides(method, seed, sizes, on_gpu, out) for name, (method, seed) in wanted.items()
    }
    ends = None if budget is None else began + budget - LAST_SECONDS
    at_once = AT_ONCE if on_gpu else 1
    train = [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", "train", str(CONFIG)]
    missing = {
        name: [*train, *line]
        for name, line in lines.items()
        if not _finished(out, name, sizes.steps)
    }
    codes = run_all(missing, at_once, out / "logs", ends)
    results = {}
    for name, (method, seed) in wanted.items():
        run_dir = out / f"{method}_{seed}"
        if (run_dir / "metrics.jsonl").is_file():
            results[name] = figures(run_dir, sizes.groups * 8)
            if on_gpu:
                results[name]["planned"] = planned(lines[name])
    with atomic_write(out / "results.json") as file:
        file.write(json.dumps({"manifest": manifest, "runs": results}, indent=1) + "\n")
    shown = table(results)
    with atomic_write(out / "results.md") as file:
        file.write("\n".join(shown) + "\n")
    console.print("\n".join(shown), markup=False)
    console.print(f"\nfigures  {out / 'results.json'}   manifest  {out / 'manifest.json'}")
    failed = [name for name, code in codes.items() if code not in (0, 75)]
    if failed:
        console.print(f"failed: {', '.join(failed)}; what they said is in {out / 'logs'}")
        raise typer.Exit(1)


def _finished(out: Path, name: str, steps: int) -> bool:
    method, seed = parse(name)
    file = out / f"{method}_{seed}" / "metrics.jsonl"
    return file.is_file() and any(row["step"] == steps for row in read_metrics(file.parent))


if __name__ == "__main__":
    typer.run(main)
