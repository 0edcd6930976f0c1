"""Accuracy over several samples per problem."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

PROBLEMS = "_problems.jsonl"
"""Suffix of evaluation/<set>_problems.jsonl: the metrics of each problem, which `compare` reads."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c correct ones.

    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1). Raises ValueError unless 0 <=
    c <= n, 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Probability that the most frequent of k answers to one problem is correct, ties broken at
    random.

    answers[i] is equal for samples with the same answer, and None for one without an answer, which
    has no vote. Where samples with the same answer differ in `correct`, their share counts. 0.0
    without votes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    hits = sum(bool(ok) for answer, ok in zip(answers, correct, strict=True) if answer in winners)
    return hits / (most * len(winners))


_DRAWN_AT_ONCE = 1 << 20  # scores, which bounds the memory of a bootstrap


LAST_STEPS = 10  # single steps say little


def mean_of_last(values: Sequence[float]) -> str:
    """The mean over the last LAST_STEPS steps and half of its 95 % interval (Student's t): 0.21 ±
    0.05; of one value the mean alone."""
    import scipy.stats

    last = np.asarray(values[-LAST_STEPS:], dtype=np.float64)
    if len(last) < 2:
        return f"{last.mean():.2f}"
    half = last.std(ddof=1) / len(last) ** 0.5 * scipy.stats.t.ppf(0.975, len(last) - 1)
    return f"{last.mean():.2f} ± {half:.2f}"


class Interval(NamedTuple):
    """A confidence interval of 95 %."""

    low: float
    high: float


def bootstrap_interval(per_problem: Sequence[float], resamples: int = 10_000) -> Interval:
    """95 % percentile bootstrap interval of the mean over problems, which are resampled with
    replacement."""
    if len(per_problem) == 1:
        return Interval(per_problem[0], per_problem[0])
    import scipy.stats  # 0.6 s, which every rank would wait for

    scores = np.asarray(per_problem, dtype=np.float64)
    result = scipy.stats.bootstrap(
        (scores,),
        np.mean,
        n_resamples=resamples,
        confidence_level=0.95,
        method="percentile",
        batch=max(1, _DRAWN_AT_ONCE // len(scores)),
        rng=np.random.default_rng(0),
    )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high))
