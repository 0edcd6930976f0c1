"""Accuracy over several samples a problem."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
import scipy.stats

PROBLEMS = "_problems.jsonl"
"""Suffix of evaluation/<set>_problems.jsonl: the metrics of each problem, which `compare` reads."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c correct ones.

    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1). Raises ValueError unless 0 <= c <= n, 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def avg_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """Mean over problems of the share of correct samples.

    Raises ValueError where no problem is given, or one has no sample.
    """
    if not correct or not all(correct):
        raise ValueError("avg@k needs a problem, and a sample for each")
    return sum(sum(samples) / len(samples) for samples in correct) / len(correct)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Probability that the most frequent of k answers to one problem is correct, ties broken at random.

    answers[i] is equal for samples that answer alike, None for one without an answer: it has no vote. Where
    samples with one answer disagree in `correct`, their share counts. 0.0 where nobody votes.
    Raises ValueError where the lengths differ.
    """
    if len(answers) != len(correct):
        raise ValueError(f"maj@k needs a grade for each answer, got {len(answers)} and {len(correct)}")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    hits = sum(bool(ok) for answer, ok in zip(answers, correct, strict=True) if answer in winners)
    return hits / (most * len(winners))


_DRAWN_AT_ONCE = 1 << 20  # scores, which bounds the memory of a bootstrap


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def bootstrap_interval(
    per_problem: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean over problems, which are resampled with replacement.

    Raises ValueError without problems, or for confidence outside (0, 1).
    """
    if not per_problem:
        raise ValueError("a bootstrap interval needs at least one problem")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    if len(per_problem) == 1:
        return Interval(per_problem[0], per_problem[0])
    scores = np.asarray(per_problem, dtype=np.float64)
    found = scipy.stats.bootstrap(
        (scores,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        batch=max(1, _DRAWN_AT_ONCE // len(scores)),
        rng=np.random.default_rng(seed),
    )
    return Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))
