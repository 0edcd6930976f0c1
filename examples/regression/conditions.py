"""Does surprise still say what a response is worth where the policy or its sampling differ?

    python -m examples.regression.conditions [--seeds 31 32 33] [--only ROW ...] [--out
    runs/regression]

`reinforce_regression` on the quickstart's task: as it is, at other temperatures, with
responses two steps old, from a policy that is sure of itself, and with a temperature that
changes in the middle. It prints, as means over steps and seeds, the accuracy, the entropy of the
policy, the explained variance of the values, the share that surprise has of it, and the steps in
which that share is negative: there its coefficient, of earlier steps, has the wrong sign. Finished
runs are not repeated, interrupted ones continue. Run from the repository's root.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from examples.ablation.intervals import interval
from examples.regression.run import FIRST_STEP, prepare, train
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics

PRESET = "reinforce_regression"
STEPS = 24
# Of the run whose policy is sure of itself.
LONG_STEPS = 72
AS_IS, SURE, CHANGES = "as it is", "sure of itself", "temperature 0.6 from step 13 on"
COLD = ("sampling.temperature=0.6",)
ROWS = {
    AS_IS: (),
    "temperature 0.6": COLD,
    "temperature 1.2": ("sampling.temperature=1.2",),
    "two steps old": (
        "rollout.asynchronous.max_staleness=2",
        "algorithm.importance_sampling.kind=tis",
    ),
    SURE: (),
    CHANGES: (),
}
SURPRISE = f"{names.REGRESSION_SHARE}surprise"


def run(folder: Path, row: str, seed: int) -> Path:
    """The run of a row, finished; its directory."""
    name = f"{row.replace(' ', '_')}_{seed}"
    if row == SURE:
        long = train(folder, PRESET, seed, LONG_STEPS, f"long_{seed}")
        start = f"model.path={long / 'hf' / 'final' / 'actor'}"
        return train(folder, PRESET, seed, STEPS, name, (start,))
    if row == CHANGES:
        train(folder, PRESET, seed, STEPS // 2, name)
        allowed = ("run.allow_config_change=[sampling.temperature]",)
        return train(folder, PRESET, seed, STEPS, name, (*COLD, *allowed))
    return train(folder, PRESET, seed, STEPS, name, ROWS[row])


def table(runs: Mapping[str, Sequence[Path]]) -> list[str]:
    """Lines of Markdown, one a row of the table."""
    lines = [
        "| | accuracy | entropy, nats | explained variance | of it by surprise | steps with a "
        "negative share |",
        "|---|---|---|---|---|---|",
    ]
    for row, folders in runs.items():
        steps = [
            [step for step in read_metrics(folder) if step["step"] >= FIRST_STEP]
            for folder in folders
        ]

        def mean(name: str, steps: list[list[dict[str, float]]] = steps) -> str:
            found = interval([fmean(step[name] for step in run if name in step) for run in steps])
            return f"{found.mean:.3f} ± {found.half:.3f}"

        shares = [step[SURPRISE] for run in steps for step in run if SURPRISE in step]
        negative = sum(share < 0 for share in shares)
        cells = [mean(names.ACCURACY), mean(names.ENTROPY), mean(names.EXPLAINED_VARIANCE)]
        cells += [mean(SURPRISE), f"{negative} of {len(shares)}"]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, seed by seed; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32, 33])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--out", type=Path, default=Path("runs/regression"))
    given = parser.parse_args(arguments)
    folder = given.out.resolve()
    prepare(folder)
    runs: dict[str, list[Path]] = {row: [] for row in given.only}
    for seed in given.seeds:
        for row in given.only:
            runs[row].append(run(folder, row, seed))
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
