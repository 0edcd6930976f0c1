"""Accuracy over several samples, against enumeration of all draws."""

from itertools import combinations

import pytest

from vapo_megatron.evaluation.metrics import bootstrap_interval, maj_at_k, pass_at_k


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_hit(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_with_many_samples() -> None:
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    assert isinstance(pass_at_k(4, 1, 1), float)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9"], [True, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        ([], [], 0.0),
    ],
)
def test_maj_at_k(answers, correct, expected: float) -> None:
    assert maj_at_k(answers, correct) == pytest.approx(expected)


def test_bootstrap_interval() -> None:
    scores = [0.0] * 50 + [1.0] * 50
    interval = bootstrap_interval(scores, resamples=4000)
    # The mean of 100 fair coins: 0.5 +- 1.96 * 0.05.
    assert interval.low == pytest.approx(0.402, abs=0.015)
    assert interval.high == pytest.approx(0.598, abs=0.015)
    assert bootstrap_interval(scores, resamples=200) == bootstrap_interval(scores, resamples=200)
    assert bootstrap_interval([0.3, 0.3], resamples=50) == pytest.approx((0.3, 0.3))
