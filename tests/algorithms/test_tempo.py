"""TEMPO's advantages, written out on a group of which two responses begin alike."""

import pytest
import torch

from vapo_megatron.algorithms.advantages import grpo
from vapo_megatron.algorithms.prefix_tree import prefix_hashes
from vapo_megatron.algorithms.tempo import tempo
from vapo_megatron.data.batch import offsets

# Two of three share their first two tokens; the last response is of another group.
TOKENS = torch.tensor([7, 8, 1, 7, 8, 2, 5, 9, 7, 8], dtype=torch.int32)
BOUNDS = offsets(torch.tensor([3, 4, 1, 2]))
GROUPS = torch.tensor([0, 0, 0, 1])
REWARDS = torch.tensor([1.0, -1.0, -1.0, 1.0])


def test_differences_of_the_tree_are_added_where_it_branches() -> None:
    z = grpo(REWARDS, GROUPS).tolist()
    both = (z[0] + z[1]) / 2
    all_three = sum(z[:3]) / 3
    first = [z[0] + both - all_three, z[0], z[0] + z[0] - both]
    second = [z[1] + both - all_three, z[1], z[1] + z[1] - both, z[1]]
    third = [z[2] + z[2] - all_three]
    penalty = torch.tensor([0.5, -0.5, 0.0, *[0.0] * 7])
    advantages = tempo(REWARDS, GROUPS, prefix_hashes(TOKENS, BOUNDS), BOUNDS, penalty)
    assert advantages.tolist() == pytest.approx([*first, *second, *third, z[3], z[3]], abs=1e-6)


def test_a_penalty_is_part_of_the_reward() -> None:
    hashes = prefix_hashes(TOKENS, BOUNDS)
    penalty = torch.zeros(10)
    penalty[3:7] = 0.25
    lower = REWARDS.clone()
    lower[1] -= 1
    expected = tempo(lower, GROUPS, hashes, BOUNDS, torch.zeros(10))
    torch.testing.assert_close(tempo(REWARDS, GROUPS, hashes, BOUNDS, penalty), expected)


def test_without_shared_tokens_it_is_grpo_but_for_the_first() -> None:
    tokens = torch.arange(10, dtype=torch.int32)
    z = grpo(REWARDS, GROUPS)
    advantages = tempo(REWARDS, GROUPS, prefix_hashes(tokens, BOUNDS), BOUNDS, torch.zeros(10))
    # All responses of a group part at their first token, and z has a mean of 0.
    expected = torch.cat([part.expand(n) for part, n in zip(z, BOUNDS.diff(), strict=True)])
    expected = expected.clone()
    expected[BOUNDS[:-1]] *= 2
    expected[BOUNDS[3]] = z[3]
    torch.testing.assert_close(advantages, expected)
