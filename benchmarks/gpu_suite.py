"""Every benchmark beside peers that needs one GPU, most valuable first, within a budget of seconds.

    make bench-gpu [BUDGET=300] [PARTS="head update"] [OUT=runs/bench-gpu] [SITE=FOLDER]
    python -m benchmarks.gpu_suite [PART ...] [--budget SECONDS] [--out FOLDER] [--site FOLDER]

Each part is a process with its own time limit; what it measured is in OUT/NAME.json as soon as it
ends, its output in OUT/logs, and OUT/results.md has all tables. The ratios are printed at the end;
above 1 ours is better. Without a GPU the same programs run at sizes of a CPU: that shows that they
work, and nothing about speed.

Exit codes as of `python -m tools.gpu_check`: 0 all parts have ended well; 1 one failed or ran past
its limit; 2 wrong usage; 3 nothing failed, but the budget ended before all were run.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_check.__main__ import environment_of_checks, gpu_name, tell_result
from tools.gpu_check.checks import Check
from tools.gpu_check.page import write_results
from tools.gpu_check.runner import Result, exit_code, run_all

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """A benchmark: its program, seconds that it may take on a GPU, and its options there and on a
    CPU."""

    module: str
    shows: str
    limit: float
    on_gpu: tuple[str, ...]
    on_cpu: tuple[str, ...]


# In the order of their worth. The limits on a GPU count an engine's first start of 45 to 55 s.
PARTS = {
    "head": Part(
        "logprob_head",
        "log-probs and entropy without logits, beside whole logits and Liger",
        100,
        ("--tokens", "8192"),
        ("--tokens", "128", "--words", "4096", "--hidden", "64", "--dtype", "float32"),
    ),
    "update": Part(
        "update_beside_transformers",
        "an update of 131,072 heavy-tailed tokens, beside transformers with Liger",
        100,
        (
            "--shape",
            "1.5b",
            "--dtype",
            "bfloat16",
            "--total",
            "131072",
            "--mean",
            "1024",
            "--longest",
            "8192",
            "--tokens",
            "16384",
        ),
        (
            "--shape",
            "tiny",
            "--total",
            "1024",
            "--mean",
            "64",
            "--longest",
            "256",
            "--repeats",
            "1",
        ),
    ),
    "phases": Part(
        "step_phases",
        "a step of 1.5B by phases, offload auto against never",
        200,
        (
            "--model",
            "1.5b",
            "--dtype",
            "bfloat16",
            "--prompts",
            "32",
            "--group",
            "8",
            "--longest",
            "510",
        ),
        ("--prompts", "4", "--group", "4", "--longest", "16", "--updates", "2", "--steps", "1"),
    ),
    "sync": Part(
        "weight_sync",
        "a weight sync of 3.1 GB against a device copy",
        100,
        ("--shape", "1.5b", "--layouts", "1x1"),
        ("--shape", "tiny", "--layouts", "1x1"),
    ),
    "collection": Part(
        "collection",
        "collection with grading beside the bare engine",
        100,
        ("--model", "1.5b", "--dtype", "bfloat16"),
        ("--prompts", "4", "--group", "4", "--longest", "16", "--repeats", "1", "--delay", "0.1"),
    ),
    "fixed": Part(
        "throughput",
        "4,096 tokens a sequence, beside transformers compiled",
        100,
        (
            "--shape",
            "1.5b",
            "--dtype",
            "bfloat16",
            "--lengths",
            "4096",
            "--tokens",
            "16384",
            "--compile",
        ),
        ("--shape", "tiny", "--lengths", "64", "--tokens", "128", "--repeats", "1"),
    ),
    "trl": Part(
        "step_beside_trl",
        "a whole GRPO step beside TRL with its continuous batching",
        200,
        (
            "--model",
            "1.5b",
            "--dtype",
            "bfloat16",
            "--longest",
            "512",
            "--steps",
            "4",
            "--rounds",
            "1",
        ),
        ("--prompts", "2", "--group", "4", "--longest", "16", "--steps", "1", "--rounds", "1"),
    ),
}
_CPU_LIMIT = 300.0


def checks_of(names: Sequence[str], out: Path, has_gpu: bool) -> list[Check]:
    """The programs of these parts, in the order of PARTS."""
    checks = []
    for name, part in PARTS.items():
        if name not in names:
            continue
        options = part.on_gpu if has_gpu else part.on_cpu
        command = ("-W", "ignore", "-m", f"benchmarks.{part.module}", *options)
        if name == "trl" and not (ROOT / ".venv-trl" / "bin" / "python").exists():
            # TRL may as well be among the installed packages.
            command += ("--trl", sys.executable)
        checks.append(
            Check(
                name=name,
                step=name,
                command=(*command, "--json", str(out / f"{name}.json")),
                limit=part.limit if has_gpu else _CPU_LIMIT,
                shows=part.shows,
                gpu=False,
            )
        )
    return checks


def ratios(results: Sequence[Result], out: Path) -> list[str]:
    """A line for each ratio that was measured."""
    lines = []
    for result in results:
        if result.status != "ok":
            continue
        for figure in json.loads((out / f"{result.check.name}.json").read_text())["figures"]:
            spread = f"({figure['low']:.3g} to {figure['high']:.3g})"
            lines.append(f"{result.check.name}: {figure['name']}: {figure['ratio']:.3g} {spread}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench-gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--budget", type=float, help="seconds for all parts")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"), help="of the results")
    parser.add_argument(
        "--site", type=Path, help="folder of packages that stands before the installed ones"
    )
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"{unknown[0]}: no such part; choose from {', '.join(PARTS)}")
    out: Path = given.out.resolve()
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}: give a folder that can be written")
    environment = environment_of_checks(given.site, os.environ)
    gpu = gpu_name(environment)
    checks = checks_of(given.parts or list(PARTS), out, bool(gpu))
    where = gpu or "no GPU that PyTorch can use: CPU sizes, which show no speed"
    print(f"bench-gpu: {where}; {len(checks)} parts, results in {out}", flush=True)
    results = run_all(
        checks,
        out / "logs",
        environment,
        root=ROOT,
        budget=given.budget,
        has_gpu=bool(gpu),
        tell=tell_result,
    )
    write_results(results, out, gpu or "no GPU", title="Benchmarks beside peers")
    for line in ratios(results, out):
        print(line)
    code = exit_code(results)
    print(f"bench-gpu: exit code {code}; see {out / 'results.md'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
