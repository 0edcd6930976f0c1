"""The share of repeated n-grams against a count with sets."""

import random
from itertools import chain

import pytest
import torch

from vapo_megatron.algorithms.shaping import repeated_share


def counted(responses: list[list[int]], n: int) -> float:
    """The definition."""
    grams = [[tuple(r[i : i + n]) for i in range(len(r) - n + 1)] for r in responses]
    total = sum(map(len, grams))
    return (total - sum(len(set(g)) for g in grams)) / total if total else 0.0


@pytest.mark.parametrize("n", [1, 2, 8, 16])
@pytest.mark.parametrize("vocabulary", [2, 5, 150_000])
def test_it_counts_repeated_grams_within_each_response(n: int, vocabulary: int) -> None:
    noise = random.Random(n * vocabulary)
    responses = [
        [noise.randrange(vocabulary) for _ in range(noise.randrange(60))] for _ in range(20)
    ]
    responses += [[3, 1, 4] * 20, responses[0], []]
    lengths = torch.tensor([0, *map(len, responses)])
    found = repeated_share(
        torch.tensor([*chain(*responses)], dtype=torch.int32), lengths.cumsum(0), n
    )
    assert found == pytest.approx(counted(responses, n))


def test_a_loop_is_near_one_and_text_near_zero() -> None:
    loop = torch.tensor([5, 6, 7] * 100)
    text = torch.arange(300)
    ends = torch.tensor([0, 300])
    assert repeated_share(loop, ends) > 0.98
    assert repeated_share(text, ends) == 0.0
    assert repeated_share(loop, torch.arange(0, 301, 10)) == 0.0, "no response has sixteen tokens"
    assert repeated_share(text[:10], torch.tensor([0, 10])) == 0.0
