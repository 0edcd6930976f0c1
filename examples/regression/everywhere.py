"""Values by regression on every task of this repository, beside the same method without them: one
table.

    python -m examples.regression.everywhere [PART ...] [--seeds 11 12 13 14 15] [--as-is]
    [--out runs/everywhere]

Parts: quickstart, adapters, ablation, tabular, lookup, compact and smollm. Each runs the program
that its task has elsewhere, in a folder of its own; what is finished is not run again. All take
about three hours on two idle cores; smollm, which asks for 10 GiB, another 50 minutes a seed, so it
runs only where it is named. Both sides of a line draw equally many responses, in equally many
steps. Learning rates were chosen on other seeds. Run from the repository's root.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from examples.ablation.intervals import Interval, interval, paired, shown
from examples.ablation.tuned_tables import area
from examples.agents import learn
from examples.regression import run as quickstart
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.signals import end_with_parent

ADAPTERS = ("actor.kind=adapter", "actor.optimizer.lr=3.6e-3")
AGENT_STEPS = {"lookup": 20, "compact": 10}
AGENT_METHODS = {
    "lookup": ("regression", "regression_turn", "grpo", "token", "turn"),
    "compact": ("regression", "grpo", "token"),
}
HELD_OUT = f"{names.EVALUATION}held_out_avg@2"
# The tables of the tabular stage have seeds of their own, none of which was used before.
TABULAR_SEEDS = "6000-6009"
PAIRS = (
    ("reinforce_regression", "reinforce_direct"),
    ("vapo_regression", "vapo_without_critic"),
    ("vapo_regression", "tempo"),
)
# As the ablation calls them.
ABLATION_PAIRS = (
    ("reinforce_regression", "reinforce_direct"),
    ("vapo_regression", "without_critic"),
    ("vapo_regression", "tempo"),
)


class Side(NamedTuple):
    """A method on a task, by seed.

    Attributes:
        accuracy: what the part measures, in [0, 1].
        explained: explained variance of the returns by the values, mean over steps; empty without
            values.
        others, position: likewise by the mean of the other responses and by position.
        seconds: of a step, median over steps.
    """

    accuracy: dict[int, float]
    explained: dict[int, float]
    others: dict[int, float]
    position: dict[int, float]
    seconds: dict[int, float]


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        measure: what accuracy is of.
        accuracy: of the method with values by regression.
        less: that accuracy less the other method's, paired by seed.
        explained, others, position: explained variance; None where it was not measured.
        seconds: of a step, over the other method's; None where it was not measured.
    """

    task: str
    method: str
    other: str
    measure: str
    seeds: int
    accuracy: Interval
    less: Interval | None
    explained: float | None
    others: float | None
    position: float | None
    seconds: float | None


def read_side(runs: Mapping[int, list[dict[str, Any]]], accuracy: dict[int, float]) -> Side:
    """A method's side from the metrics of its runs by seed. The second half of the steps says what
    values explain."""
    explained: dict[str, dict[int, float]] = {
        name: {} for name in (names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION)
    }
    seconds = {}
    for seed, rows in runs.items():
        steps = [row for row in rows if names.STEP_TIME in row]
        seconds[seed] = median(row[names.STEP_TIME] for row in steps)
        for name, by_seed in explained.items():
            measured = [row[name] for row in steps[len(steps) // 2 :] if name in row]
            if measured:
                by_seed[seed] = fmean(measured)
    return Side(
        accuracy,
        explained=explained[names.EXPLAINED_VARIANCE],
        others=explained[names.BASELINE_LOO],
        position=explained[names.BASELINE_POSITION],
        seconds=seconds,
    )


def compared(
    task: str, measure: str, sides: Mapping[str, Side], pairs: Sequence[tuple[str, str]]
) -> list[Line]:
    """A line for each pair of methods of which both have run."""
    lines = []
    for method, other in pairs:
        if not (sides.get(method) and sides.get(other)):
            continue
        first = sides[method]
        second = sides[other]
        both = sorted(set(first.accuracy) & set(second.accuracy))
        if not both:
            continue
        timed = [first.seconds[seed] / second.seconds[seed] for seed in both if first.seconds]
        lines.append(
            Line(
                task,
                method,
                other,
                measure,
                len(both),
                interval([first.accuracy[seed] for seed in both]),
                paired(first.accuracy, second.accuracy),
                _mean_over(first.explained, both),
                _mean_over(first.others, both),
                _mean_over(first.position, both),
                fmean(timed) if timed else None,
            )
        )
    return lines


def _mean_over(by_seed: Mapping[int, float], seeds: Sequence[int]) -> float | None:
    measured = [by_seed[seed] for seed in seeds if seed in by_seed]
    return fmean(measured) if measured else None


def quickstart_part(
    out: Path, seeds: Sequence[int], as_is: bool, overrides: Sequence[str] = ()
) -> dict[str, Side]:
    """The quickstart's task after its cold start: accuracy of the rollouts from step 5 on."""
    if not as_is:
        quickstart.prepare(out)
    rows = dict.fromkeys(name for pair in PAIRS for name in pair)
    if overrides:
        rows = dict.fromkeys(PAIRS[0])
    sides = {}
    for name in rows:
        runs = {}
        for seed in seeds:
            run_dir = out / f"{name}_{seed}"
            if not as_is:
                quickstart.train(out, name, seed, 24, overrides=overrides)
            if (run_dir / "hf" / "final").is_dir():
                runs[seed] = run_dir
        accuracy = {seed: quickstart.read(run_dir)["mean"] for seed, run_dir in runs.items()}
        metrics = {seed: read_metrics(run_dir) for seed, run_dir in runs.items()}
        sides[name] = read_side(metrics, accuracy)
    return sides


def on_quickstart(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """Lines of the quickstart's task."""
    sides = quickstart_part(out, seeds, as_is)
    return compared("quickstart", "rollouts, steps 5 to 24", sides, PAIRS)


def on_adapters(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """A line of the same with a policy of adapters."""
    sides = quickstart_part(out, seeds, as_is, ADAPTERS)
    return compared("quickstart, adapters", "rollouts, steps 5 to 24", sides, PAIRS[:1])


def on_ablation(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """The ablation's task for transformers, each row at its own learning rate: area under accuracy
    on unseen problems by responses."""
    if not as_is:
        chosen = f"seeds=[{','.join(map(str, seeds))}]"
        program("examples.ablation.run", "--variant", "values", chosen, "--out", out)
    file = out / "measured.json"
    if not file.is_file():
        return []
    setting = json.loads(file.read_text())["settings"]["steps"]
    sides = {}
    for name, row in setting["rows"].items():
        of_row = row["seeds"].items()
        by_seed = {
            kind: {
                int(seed): fmean(value for value in found[kind] if value is not None)
                for seed, found in of_row
                if kind in found
            }
            for kind in ("explained", "baseline_loo", "baseline_position")
        }
        seconds = {
            int(seed): found["cpu_seconds"][0] for seed, found in of_row if "cpu_seconds" in found
        }
        sides[name] = Side(
            area(setting, row, "responses"),
            explained=by_seed["explained"],
            others=by_seed["baseline_loo"],
            position=by_seed["baseline_position"],
            seconds=seconds,
        )
    return compared("ablation, steps", "area by responses", sides, ABLATION_PAIRS)


def on_tables(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """The tabular stage, each row at its own learning rate: area by responses."""
    lines = []
    for setting in ("steps", "insight", "forks"):
        file = out / f"{setting}.json"
        if not as_is and not file.is_file():
            place = ("--setting", setting, "--seeds", TABULAR_SEEDS, "--out", file)
            program("examples.ablation.tabular.price", "--regression", *place)
        if not file.is_file():
            continue
        figures = json.loads(file.read_text())
        rows = figures["settings"][setting]["tables"]["tuned"]
        for method, other in ABLATION_PAIRS[:2]:
            row = rows[method]
            lines.append(
                Line(
                    f"tables, {setting}",
                    method,
                    other,
                    "area by responses",
                    len(figures["seeds"]),
                    Interval(*row["area"]),
                    Interval(*row[f"less_{other}"]),
                    row["explains"][0],
                    None,
                    None,
                    None,
                )
            )
    return lines


def on_agents(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """An agent with a tool: accuracy on unseen problems at the end."""
    task = out.name
    if not as_is:
        options = [option for seed in seeds for option in ("--seed", str(seed))]
        methods = [option for method in AGENT_METHODS[task] for option in ("--method", method)]
        steps = ("--steps", AGENT_STEPS[task])
        program("examples.agents.learn", "--task", task, *methods, *steps, *options, "--out", out)
    sides = {}
    for method in AGENT_METHODS[task]:
        runs = {}
        for seed in seeds:
            run_dir = out / f"seed{seed}" / method
            if (run_dir / "hf" / "final").is_dir():
                runs[seed] = read_metrics(run_dir)
        accuracy = {seed: learn.accuracies(rows)[-1] for seed, rows in runs.items()}
        sides[method] = read_side(runs, accuracy)
    pairs = (
        ("regression", "grpo"),
        ("regression", "token"),
        ("regression_turn", "grpo"),
        ("regression_turn", "turn"),
    )
    return compared(f"agent, {task}", "unseen problems, at the end", sides, pairs)


def on_smollm(out: Path, seeds: Sequence[int], as_is: bool) -> list[Line]:
    """SmolLM2-135M on small problems: accuracy on held-out ones at the end."""
    sides = {}
    for preset in ("vapo_regression", "vapo_without_critic"):
        runs = {}
        for seed in seeds:
            folder = out / f"{preset}_{seed}"
            if not as_is and not (folder / "check.json").is_file():
                place = ("--seed", seed, "--preset", preset, "--out", folder)
                program("examples.smollm.run", *place, "--model", out / "model")
            if (folder / "check.json").is_file():
                runs[seed] = read_metrics(folder / "rl")
        accuracy = {
            seed: [row[HELD_OUT] for row in rows if HELD_OUT in row][-1]
            for seed, rows in runs.items()
        }
        sides[preset] = read_side(runs, accuracy)
    return compared("SmolLM2-135M", "held-out problems, at the end", sides, PAIRS[1:2])


PARTS: dict[str, Callable[[Path, Sequence[int], bool], list[Line]]] = {
    "quickstart": on_quickstart,
    "adapters": on_adapters,
    "ablation": on_ablation,
    "tabular": on_tables,
    "lookup": on_agents,
    "compact": on_agents,
    "smollm": on_smollm,
}
# Where none is named: those that need no gigabytes.
DEFAULT = [part for part in PARTS if part != "smollm"]


def program(module: str, *arguments: object) -> None:
    """Run one of the examples' programs; its failure is ours."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    if code := subprocess.run(command, preexec_fn=end_with_parent).returncode:
        raise SystemExit(code)


def table(lines: Sequence[Line]) -> list[str]:
    """Lines of Markdown."""
    titles = [
        "task",
        "with values by regression",
        "beside",
        "accuracy of",
        "seeds",
        "accuracy",
        "less the other's",
        "explained",
        "by the others' mean",
        "by position",
        "seconds of a step, over the other's",
    ]
    shown_lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for line in lines:
        figures = [
            "–" if value is None else f"{value:.2f}"
            for value in (line.explained, line.others, line.position, line.seconds)
        ]
        cells = [
            line.task,
            f"`{line.method}`",
            f"`{line.other}`",
            line.measure,
            str(line.seeds),
            f"{line.accuracy.mean:.3f}",
            shown(line.less),
            *figures,
        ]
        shown_lines.append(f"| {' | '.join(cells)} |")
    return shown_lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, part by part; print the table of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    parser.add_argument("--out", type=Path, default=Path("runs/everywhere"))
    parser.add_argument("--as-is", action="store_true", help="run nothing, print what is there")
    given = parser.parse_args(arguments)
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"{part}: expected some of: {', '.join(PARTS)}")
    lines = []
    for part in given.parts or DEFAULT:
        lines += PARTS[part](given.out.resolve() / part, given.seeds, given.as_is)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
