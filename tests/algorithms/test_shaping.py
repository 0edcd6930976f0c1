"""Rewards that depend on length, worked out by hand."""

import pytest
import torch

from vapo_megatron.algorithms.shaping import kimi_length_reward, soft_overlong


def test_soft_overlong_with_the_numbers_of_dapo() -> None:
    lengths = torch.tensor([1, 16384, 18432, 20480, 20481, 30000])
    assert soft_overlong(lengths, max_length=20480, cache_length=4096).tolist() == [0, 0, -0.5, -1, -1, -1]


def test_the_least_and_the_largest_cache() -> None:
    lengths = torch.tensor([0, 2, 3, 4])
    assert soft_overlong(lengths, max_length=4, cache_length=1).tolist() == [0, 0, 0, -1]
    assert soft_overlong(lengths, max_length=4, cache_length=4).tolist() == [0, -0.5, -0.75, -1]


@pytest.mark.parametrize("cache", [0, 101])
def test_soft_overlong_refuses_a_cache_outside_the_length(cache: int) -> None:
    with pytest.raises(ValueError, match="cache_length"):
        soft_overlong(torch.tensor([1]), max_length=100, cache_length=cache)


def test_kimi_length_reward() -> None:
    # Group 5: lengths 10..30, so lambda = 0.5, 0, -0.5 and 0.25; group 2: all equal.
    lengths = torch.tensor([10, 20, 7, 30, 15, 7, 10])
    groups = torch.tensor([5, 5, 2, 5, 5, 2, 5])
    correct = torch.tensor([1, 1, 1, 1, 0, 0, 0])
    assert kimi_length_reward(lengths, correct, groups).tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert kimi_length_reward(lengths, 1 - correct, groups).tolist() == [0.0, 0.0, 0.0, -0.5, 0.25, 0.0, 0.5]


def test_kimi_length_reward_spans_its_range_where_lengths_differ_by_one() -> None:
    lengths, groups = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64)
    assert kimi_length_reward(lengths, torch.ones(2), groups).tolist() == [0.5, -0.5]
