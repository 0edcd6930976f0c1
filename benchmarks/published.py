"""Plans beside the step times that other systems publish, in their settings, and plans of the AIME
configs.

    python -m benchmarks.published [--write] [--fit]

benchmarks/published.yaml has figures, sources and settings. What a running response costs the
engines of these systems is fitted to the rows marked there, and --fit prints their mean absolute
log-error for a range of it. All efficiencies but those of decoding are the defaults.
--write puts the tables between their marks in results/plan.md and the README of the AIME example.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.files import atomic_write
from vapo_megatron.operations.plan.inputs import GIB, SHIPPED
from vapo_megatron.operations.plan.plan import Plan, default_world, make_plan

ROOT = Path(__file__).parents[1]
PRESETS = ROOT / "vapo_megatron" / "config" / "presets"
AIME = ROOT / "examples" / "aime_qwen2.5_32b"
AIME_CONFIGS = ("vapo", "vapo_fp8", "vapo_4nodes", "dapo", "grpo", "ppo", "vapo_7b", "vapo_1.5b")
BEGIN, END = "<!-- python -m benchmarks.published --write -->", "<!-- end of the table -->"


def plan_of(row: dict[str, Any], content: dict[str, Any], *more: str) -> Plan:
    """The plan in the settings of a row, with further overrides."""
    overrides = [
        *content["common"],
        *content["hardware"][row["hardware"]],
        *row["settings"],
        *row["overrides"],
        *more,
    ]
    config = load_config(PlanConfig, ROOT / "examples" / "gsm8k" / "vapo.yaml", overrides, PRESETS)
    return make_plan(config, row["gpus"])


def table() -> str:
    """The rows in Markdown, and how far off they are."""
    content = yaml.safe_load((ROOT / "benchmarks" / "published.yaml").read_text())
    lines = [
        "| setting | published, s | planned, s | error | generation, published | planned | mean "
        "length | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"fitted": [], "held out": [], "assumed": []}
    for row in content["rows"]:
        plan, source = plan_of(row, content), content["sources"][row["source"]]
        error = plan.time.step / row["seconds"] - 1
        half = (
            "fitted"
            if "fitted" in row
            else "held out"
            if row["length"] == "published"
            else "assumed"
        )
        errors[half].append(error)
        share = f"{row['rollout_share']:.0%}" if "rollout_share" in row else ""
        length = f"assumed: {plan.lengths.mean:.0f}" if half == "assumed" else f"published, {half}"
        lines.append(
            f"| {row['name']} | {row['seconds']:g} | "
            f"{plan.time.step:.0f}{'' if plan.fits else ' (does not fit)'} | {error:+.0%} | "
            f"{share} | {plan.time.phases['rollout'] / plan.time.step:.0%} | {length} | "
            f"[{source['title']}]({source['url']}) |"
        )
    every, fitted, held_out = (
        f"{statistics.median(map(abs, rows)):.0%} ({max(rows, key=abs):+.0%} at worst)"
        for rows in (errors["fitted"] + errors["held out"], errors["fitted"], errors["held out"])
    )
    lines += [
        "",
        f"Where the length is published, the median error of all rows is {every}: {fitted} of the "
        f"rows that one constant was fitted to, {held_out} of those held out. Where the length is "
        f"assumed, it is up to {max(errors['assumed'], key=abs):+.0%}.",
    ]
    return "\n".join(lines)


def fit() -> None:
    """Print how far the fitted rows are off on average by the seconds of a running response."""
    content = yaml.safe_load((ROOT / "benchmarks" / "published.yaml").read_text())
    for seconds in (0.0, 4e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4, 1.2e-4, 1.6e-4):
        given = f"hardware.efficiency.request_overhead={seconds}"
        rows = [row for row in content["rows"] if "fitted" in row]
        logs = [
            abs(math.log(plan_of(row, content, given).time.step / row["seconds"])) for row in rows
        ]
        print(f"{seconds:.1e} s: {statistics.mean(logs):.3f}")


def aime_table() -> str:
    """What a plan says of each AIME config, in Markdown."""
    lines = [
        "| config | GPUs | GiB of a GPU, rollout / training | GiB of a node's own memory | "
        "rollout, s | step, s | GPU-hours of the run |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in AIME_CONFIGS:
        config = load_config(PlanConfig, AIME / f"{name}.yaml", [], PRESETS)
        # The sizes that the package has, whatever may lie in models/ here.
        shipped = {"path": str(SHIPPED / Path(config.model.path).name)}
        config = config.model_copy(update={"model": config.model.model_copy(update=shipped)})
        plan = make_plan(config, default_world(config))
        rollout, *training = (phase.total / GIB for phase in plan.memory.phases)
        lines.append(
            f"| {name}.yaml | {plan.world} | {rollout:.1f} / {max(training):.1f} | "
            f"{plan.memory.host.total / GIB:.0f} | {plan.time.phases['rollout']:.0f} | "
            f"{plan.time.step:.0f} | {plan.gpu_hours:,.0f} |"
        )
    return "\n".join(lines)


TABLES = {ROOT / "results" / "plan.md": table, AIME / "README.md": aime_table}


def page(path: Path) -> str:
    """A page with its table as it is now."""
    before, rest = path.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{TABLES[path]()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the tables, or write them."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--write", action="store_true", help="put them into their pages")
    arguments.add_argument(
        "--fit", action="store_true", help="print how the fitted constant was chosen"
    )
    given = arguments.parse_args()
    if given.fit:
        fit()
        return
    write = given.write
    for path, make in TABLES.items():
        if not write:
            print(make(), end="\n\n")
            continue
        text = page(path)
        with atomic_write(path) as out:
            out.write(text)


if __name__ == "__main__":
    main()
