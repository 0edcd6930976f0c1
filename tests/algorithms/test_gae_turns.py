"""GAE over turns, against the sum written out."""

import pytest
import torch

from vapo_megatron.algorithms.gae import decoupled_gae, monte_carlo_returns, turn_bounds, turn_gae


def test_turns_begin_after_observations_and_at_responses() -> None:
    places = torch.tensor([3, 4, 7, 8, 9, 12, 13])
    turns, responses = turn_bounds(places, torch.tensor([0, 5, 7]))
    assert turns.tolist() == [0, 2, 5, 7] and responses.tolist() == [0, 2, 3]


def test_a_turn_has_one_value_and_one_advantage() -> None:
    values = torch.tensor([0.5, 9.0, 0.2, 9.0, 9.0, 0.7])
    rewards = torch.tensor([0.0, 0.1, 0.0, 0.0, 1.0, -1.0])
    turns = torch.tensor([0, 2, 5, 6])
    responses = torch.tensor([0, 2, 3])
    lam = 0.8
    gamma = 0.9
    advantages, targets = turn_gae(rewards, values, turns, responses, lam, 1.0, gamma)
    second = 1.0 - 0.2
    first = 0.1 + gamma * 0.2 - 0.5 + gamma * lam * second
    assert torch.allclose(advantages, torch.tensor([first, first, second, second, second, -1.7]))
    start = 0.1 + gamma * 1.0
    assert torch.allclose(targets, torch.tensor([start, start, 1.0, 1.0, 1.0, -1.0]))


def test_turns_of_one_token_are_gae_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(9, generator=generator)
    rewards = torch.rand(9, generator=generator)
    bounds = torch.tensor([0, 4, 9])
    lam = torch.tensor([0.3, 0.9])
    expected = decoupled_gae(rewards, values, bounds, lam, 1.0, 0.97)
    found = turn_gae(rewards, values, torch.arange(10), bounds, lam, 1.0, 0.97)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_returns_of_rewards_on_the_way_are_those_of_a_loop(gamma: float) -> None:
    rewards = torch.tensor([1.0, -0.5])
    earlier = torch.tensor([0.25, 0.0, 0.0, 0.0, 0.5])
    # A reward at its token, and the rest of a response's at its end
    placed = [
        0.25,
        0.0,
        0.75,
        0.0,
        -0.5,
    ]
    expected: list[float] = []
    for begin, end in ((0, 3), (3, 5)):
        returns = [
            sum(gamma ** (n - t) * placed[n] for n in range(t, end)) for t in range(begin, end)
        ]
        expected += returns
    found = monte_carlo_returns(rewards, torch.tensor([0, 3, 5]), gamma, earlier)
    assert found.tolist() == pytest.approx(expected)
