"""Rewards that depend on length, worked out by hand."""

import torch

from vapo_megatron.algorithms.shaping import soft_overlong


def test_soft_overlong_with_the_numbers_of_dapo() -> None:
    lengths = torch.tensor([1, 16384, 18432, 20480, 20481, 30000])
    assert soft_overlong(lengths, max_length=20480, cache_length=4096).tolist() == [
        0,
        0,
        -0.5,
        -1,
        -1,
        -1,
    ]


def test_the_least_and_the_largest_cache() -> None:
    lengths = torch.tensor([0, 2, 3, 4])
    assert soft_overlong(lengths, max_length=4, cache_length=1).tolist() == [0, 0, 0, -1]
    assert soft_overlong(lengths, max_length=4, cache_length=4).tolist() == [0, -0.5, -0.75, -1]
