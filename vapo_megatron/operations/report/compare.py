"""Compares two evaluations of the same problems by a paired test. A training run counts with its
last evaluation."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from vapo_megatron.config.base import differences
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.metrics import PROBLEMS, bootstrap_interval
from vapo_megatron.evaluation.sets import digest_of
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.monitoring.pictures import Histogram, Intervals, histogram
from vapo_megatron.operations.report.runs import read_evaluation

_OF_STEP = re.compile(r"step_\d+_(?P<set>.+)\.jsonl")  # training/outputs.py writes them
_BINS = 9
_RESAMPLES = 100_000  # flips; where there are no more than these in all, every one is tried
_FLIPPED_AT_ONCE = 1 << 20  # differences, which bounds the memory of a test


@dataclass(frozen=True)
class Comparison:
    """b against a on one set.

    difference is avg@k of b minus avg@k of a over the same problems, low and high its 95 %
    bootstrap interval; p_value is from the two-sided sign-flip permutation test of "no difference"
    (Fisher); better and worse count problems, and changes counts them by their difference in nine
    equal bins from -1 to 1, whose middle one holds those that are about as before.
    """

    name: str
    problems: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int
    changes: list[int] = field(default_factory=list)

    @property
    def picture(self) -> Histogram:
        """Problems by how much they changed."""
        edges = [-1 + 2 * number / _BINS for number in range(_BINS + 1)]
        title = f"{self.name}: problems by the difference of their shares"
        return Histogram(title, "problems", edges, self.changes, 0.0)


def compare_runs(a: Path, b: Path) -> list[Comparison]:
    """Every set that both evaluations answered, by name.

    Raises:
        BadInput: a directory is no finished evaluation, both have no set in common, or a set's
            problems differ.
    """
    sets_a = _sets(a)
    sets_b = _sets(b)
    common = sorted(set(sets_a) & set(sets_b))
    if not common:
        raise BadInput(
            f"{a} and {b}: have no set in common ({', '.join(sorted(sets_a))} and "
            f"{', '.join(sorted(sets_b))}): "
            "evaluate both on the same sets"
        )
    return [compare_evaluations(name, sets_a[name], sets_b[name]) for name in common]


def compare_evaluations(name: str, a: Path, b: Path) -> Comparison:
    """Two files of evaluation/ that answer the same set. Raises BadInput where their problems
    differ."""
    first = _problems(a)
    second = _problems(b)
    for key in sorted(first.keys() | second.keys()):
        if key not in first or key not in second:
            raise BadInput(
                f"set {name}: problem {key} was answered in one evaluation alone: evaluate both on "
                f"the same file"
            )
        if first[key][0] != second[key][0]:
            raise BadInput(
                f"{a} and {b}: problem {key} has another text or another answer in the two: "
                f"evaluate both on the same "
                "file"
            )
    shares = np.array([(first[key][1], second[key][1]) for key in sorted(first)])
    differences = (shares[:, 1] - shares[:, 0]).tolist()
    interval, (mean_a, mean_b) = bootstrap_interval(differences), shares.mean(axis=0).tolist()
    p_value = sign_flip_p_value(differences)
    better, worse = (sum(sign * difference > 0 for difference in differences) for sign in (1, -1))
    difference = float(np.mean(differences))
    return Comparison(
        name,
        len(differences),
        mean_a,
        mean_b,
        difference,
        interval.low,
        interval.high,
        p_value,
        better,
        worse,
        list(histogram("", "", differences, -1.0, 1.0, _BINS, 0.0).counts),
    )


def intervals_of_differences(comparisons: Sequence[Comparison]) -> Intervals:
    """A picture of the differences of all sets."""
    rows = [(row.name, row.low, row.difference, row.high) for row in comparisons]
    most = max(0.05, *(abs(end) for row in comparisons for end in (row.low, row.high)))
    title = "Difference of avg@k, second less first, 95 % intervals"
    return Intervals(title, rows, -most, most, 0.0)


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of "the difference of every pair might as well have the other sign" for the
    mean.

    Exact up to 16 pairs that differ, else by 100,000 random flips, the observed one counted
    (Phipson and Smyth, arXiv 1603.05766): never 0.
    """
    moved = np.array([delta for delta in differences if delta != 0.0])
    if len(moved) < 2:
        return 1.0
    test = scipy.stats.permutation_test(
        (moved,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _FLIPPED_AT_ONCE // len(moved)),
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def comparison_table(first: Path, second: Path, comparisons: Sequence[Comparison]) -> None:
    """A line per set, and its interpretation, on standard output."""
    console = RunConsole()
    console.header("vapo-megatron compare", {"first": first, "second": second})
    evaluations = read_evaluation(first), read_evaluation(second)
    for run_dir, evaluation in zip((first, second), evaluations, strict=True):
        if (step := evaluation.get("step")) is not None:
            console.note(f"{run_dir}: a training run, its evaluation after step {step}")
    titles = [
        "set",
        "problems",
        "first",
        "second",
        "difference",
        "95 % interval",
        "better/worse",
        "p",
    ]
    rows = [
        [
            row.name,
            str(row.problems),
            f"{row.a:.3f}",
            f"{row.b:.3f}",
            f"{row.difference:+.3f}",
            f"[{row.low:+.3f}, {row.high:+.3f}]",
            f"{row.better}/{row.worse}",
            shown_p_value(row.p_value),
        ]
        for row in comparisons
    ]
    console.table(titles, rows)
    console.picture(intervals_of_differences(comparisons))
    for comparison in comparisons:
        console.picture(comparison.picture)
    for key, ours, theirs in differences(
        *(evaluation.get("sampling", {}) for evaluation in evaluations)
    ):
        console.note(f"not sampled alike: {key} {ours} against {theirs}")
    console.note(
        "p: two-sided, paired by problem (sign-flip permutation test of the mean difference)"
    )


def comparison_as_json(
    first: Path, second: Path, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """What the table says, for programs. step: of a training run, the step of its evaluation, else
    None."""
    evaluations = read_evaluation(first), read_evaluation(second)
    sampled = (evaluation.get("sampling", {}) for evaluation in evaluations)
    return {
        "first": {"directory": str(first), "step": evaluations[0].get("step")},
        "second": {"directory": str(second), "step": evaluations[1].get("step")},
        "sets": [asdict(comparison) for comparison in comparisons],
        "sampling_differences": {key: list(values) for key, *values in differences(*sampled)},
    }


def shown_p_value(p_value: float) -> str:
    """For people: a bound where four places would show nothing."""
    if p_value < 1e-4:
        return "< 1e-4"
    return f"{p_value:.4f}"


def _sets(run_dir: Path) -> dict[str, Path]:
    """The file of each answered set; in a training run, of the last step."""
    folder = run_dir / "evaluation"
    sets = {path.name.removesuffix(PROBLEMS): path for path in folder.glob(f"*{PROBLEMS}")}
    for path in sorted(folder.glob("step_*.jsonl")) if not sets else ():
        if (named := _OF_STEP.fullmatch(path.name)) is not None:
            sets[named["set"]] = path
    if not sets:
        raise BadInput(
            f"{run_dir}: holds no evaluation/*{PROBLEMS}, nor evaluation/step_*.jsonl: give the "
            f"directory of "
            "a finished evaluation, or of a training run with data.eval"
        )
    return sets


def _problems(path: Path) -> dict[str, tuple[Any, float]]:
    """By id a digest of text and answer, and the share of samples that are correct."""
    counts: dict[str, tuple[Any, int, int]] = {}
    for number, row in read_rows(path):
        try:
            if path.name.endswith(PROBLEMS):
                counts[str(row["id"])] = row.get("digest"), int(row["correct"]), int(row["samples"])
            else:
                _, correct, samples = counts.get(row["id"], (None, 0, 0))
                digest = digest_of(row["problem"], row["answer"])
                counts[row["id"]] = digest, correct + bool(row["correct"]), samples + 1
        except (KeyError, TypeError, ValueError):
            raise BadInput(
                f"{path}:{number}: not a row of an evaluation of this version; evaluate again"
            ) from None
    if not counts or not all(samples for _, _, samples in counts.values()):
        raise BadInput(f"{path}: holds no rows, or a problem without samples; evaluate again")
    return {
        name: (digest, correct / samples) for name, (digest, correct, samples) in counts.items()
    }
