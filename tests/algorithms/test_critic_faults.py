"""Faults planted into a sound critic of a chain whose values are known are named, and nothing else
is."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.aggregation import token_weights
from vapo_megatron.algorithms.critic_faults import (
    FAULTS,
    loss_counts,
    loss_faults,
    sibling_gap,
    target_faults,
    value_faults,
)
from vapo_megatron.algorithms.critic_metrics import Figures, figures_of
from vapo_megatron.algorithms.gae import decoupled_gae
from vapo_megatron.algorithms.segments import place_terminal, to_tokens

GROUPS = 64
SIZE = 8
LENGTH = 12


class Chain:
    """Responses that walk between -1 and 1 by fair steps: the value of a state is the state
    itself."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.rand(GROUPS, generator=generator).mul(1.6).sub(0.8).repeat_interleave(SIZE)
        states = [start]
        for _ in range(LENGTH - 1):
            room = 1 - states[-1].abs()
            side = torch.randint(0, 2, start.shape, generator=generator) * 2 - 1
            states.append(states[-1] + 0.5 * room * side)
        last = states[-1]
        self.outcomes = torch.where(
            torch.rand(last.shape, generator=generator) < (last + 1) / 2, 1.0, -1.0
        )
        self.values = torch.stack(states, 1).flatten()
        self.cu = torch.arange(0, len(start) * LENGTH + 1, LENGTH)
        self.groups = torch.arange(GROUPS).repeat_interleave(SIZE)
        self.returns = to_tokens(self.outcomes, self.cu)

    def faults(self, values: Tensor, returns: Tensor | None = None) -> list[str]:
        figures = figures_of(values, self.returns if returns is None else returns, self.cu)
        return value_faults(
            Figures.read(figures), self.groups, torch.ones(len(self.groups), dtype=torch.bool)
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_critic_has_none(seed: int) -> None:
    chain = Chain(seed)
    assert chain.faults(chain.values) == []
    assert chain.faults(0.5 * chain.values) == [], "one that is still learning says too little"
    noise = 0.05 * torch.randn(chain.values.shape, generator=torch.Generator().manual_seed(seed))
    noise[chain.cu[:-1]] = 0
    assert chain.faults(chain.values + noise) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("fault", "plant"),
    [
        ("constant", lambda v: torch.zeros_like(v)),
        ("constant", lambda v: torch.full_like(v, -0.7)),
        ("sign", lambda v: -v),
        ("scale", lambda v: v / 5),
        ("scale", lambda v: v * 5),
        ("shift", lambda v: v.roll(1)),
        ("shift", lambda v: v.roll(-1)),
    ],
)
def test_a_fault_of_values_is_named(seed: int, fault: str, plant) -> None:  # type: ignore[no-untyped-def]
    chain = Chain(seed)
    assert chain.faults(plant(chain.values)) == [fault]
    assert fault in FAULTS


def test_the_sign_of_the_reward_is_named() -> None:
    chain = Chain()
    assert chain.faults(chain.values, -chain.returns) == ["sign"]


def test_masks_that_leave_out_what_they_should_not_are_named() -> None:
    chain = Chain()
    selected = torch.arange(len(chain.outcomes)) % 3 != 0
    weights = to_tokens(token_weights(chain.cu.diff(), "token_mean", selected=selected), chain.cu)
    assert loss_faults(loss_counts(weights, selected, chain.cu)) == []
    without_end = weights.clone()
    without_end[chain.cu[1:] - 1] = 0
    assert loss_faults(loss_counts(without_end, selected, chain.cu)) == ["end"]
    assert loss_faults(loss_counts((weights == 0).float(), selected, chain.cu)) == ["mask"]


def figures(values: list[float], returns: list[float], lengths: list[int]) -> Figures:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return Figures.read(figures_of(torch.tensor(values), torch.tensor(returns), cu))


def test_faults_are_told_of_responses_with_a_return_alone() -> None:
    """Values of the others may be anything; a token alone says nothing, two equal ones do."""
    one = figures([0.5, 9.0, 9.0], [1.0, 0.0, 0.0], [1, 2])
    groups = torch.tensor([0, 1])
    assert value_faults(one, groups, torch.tensor([True, False])) == []
    assert value_faults(one, groups, torch.tensor([False, True])) == ["constant"]
    assert value_faults(one, groups, torch.tensor([True, True])) == []
    # Rounding of large numbers is no spread: 1e-6 of their size.
    large = figures([1000.0, 1000.0005], [1.0, 0.0], [2])
    assert value_faults(large, groups[:1], torch.tensor([True])) == ["constant"]
    small = figures([1.0, 1.00001], [1.0, 0.0], [2])
    assert value_faults(small, groups[:1], torch.tensor([True])) == []


def noisy(responses: int, slope: float, noise: float = 0.0) -> tuple[Figures, torch.Tensor]:
    """Responses of two tokens: V alternates about 0 and R follows it except for noise."""
    values = torch.arange(responses) % 2 * 2.0 - 1
    chance = noise * (torch.arange(responses) // 2 % 2 * 2.0 - 1)
    returns = (slope * values + chance).repeat_interleave(2)
    cu = torch.arange(0, 2 * responses + 1, 2)
    return Figures.read(figures_of(values.repeat_interleave(2), returns, cu)), torch.arange(
        responses
    )


@pytest.mark.parametrize(
    ("responses", "slope", "noise", "faults"),
    [
        (32, 1.0, 0.0, []),
        (32, -1.0, 0.0, ["sign"]),
        (31, -1.0, 0.0, []),  # so few may look like that by chance
        (64, -1.0, 2.4, ["sign"]),  # correlation 0.38 of 3 / 8
        (64, -1.0, 2.6, []),  # 0.36
        (32, 4.1, 0.0, ["scale"]),
        (32, 3.9, 0.0, []),
        (32, 0.39, 0.0, ["scale"]),
        (32, 0.41, 0.0, []),
        (64, 0.3, 0.2, ["scale"]),  # standard error 0.2 / 8
        (64, 0.3, 0.3, []),
        (64, 4.3, 0.5, ["scale"]),
        (64, 4.3, 1.0, []),
    ],
)
def test_what_is_estimated_counts_beyond_three_standard_errors(
    responses: int, slope: float, noise: float, faults: list[str]
) -> None:
    found, groups = noisy(responses, slope, noise)
    assert value_faults(found, groups, torch.ones(responses, dtype=torch.bool)) == faults


@pytest.mark.parametrize(("responses", "empty", "faults"), [(32, 4, ["sign"]), (31, 4, [])])
def test_responses_of_one_token_count_and_empty_ones_do_not(
    responses: int, empty: int, faults: list[str]
) -> None:
    values = [float(s % 2) for s in range(responses)]
    found = figures(values, [-v for v in values], [1] * responses + [0] * empty)
    everyone = torch.ones(responses + empty, dtype=torch.bool)
    assert value_faults(found, torch.arange(responses + empty), everyone) == faults


def test_empty_responses_and_those_alone_have_no_siblings() -> None:
    found = figures([0.0, 1.0, 0.2, 0.4, 1.0], [0.0] * 5, [2, 0, 2, 1])
    assert sibling_gap(found, torch.tensor([0, 0, 1, 2])) == 0
    # First values 0.0 and 0.2 of one group, 1.0 alone: half their distance.
    assert sibling_gap(found, torch.tensor([0, 0, 0, 2])) == pytest.approx(0.1)
    assert sibling_gap(found, torch.tensor([0, 2, 1, 2])) == 0
    everyone = torch.ones(4, dtype=torch.bool)
    assert value_faults(found, torch.tensor([0, 0, 0, 2]), everyone) == ["shift"]
    assert value_faults(found, torch.tensor([0, 0, 1, 2]), everyone) == []


def test_shift_fault_needs_tenth_of_spread_and_hundredth_of_max() -> None:
    def faults(gap: float, middle: float) -> list[str]:
        found = figures([middle, middle - 1, middle + gap, middle + 1], [0.0] * 4, [2, 2])
        return value_faults(found, torch.tensor([0, 0]), torch.tensor([True, True]))

    assert faults(0.1, 0.0) == [] and faults(0.2, 0.0) == ["shift"]  # spread 0.71, half the gap
    assert faults(0.2, 20.0) == [] and faults(0.5, 20.0) == ["shift"]


@pytest.mark.parametrize(
    ("counts", "faults"),
    [
        ((4, 2, 2, 1), []),
        ((5, 2, 2, 2), ["mask"]),
        ((9, 4, 9, 9), ["mask"]),
        ((9, 9, 5, 2), ["end"]),
        ((0,) * 4, []),
    ],
)
def test_half_of_the_tokens_and_of_the_ends_is_enough(
    counts: tuple[int, ...], faults: list[str]
) -> None:
    assert loss_faults(torch.tensor(counts)) == faults


def test_targets_that_were_made_after_an_update_are_named() -> None:
    chain = Chain()
    rewards = place_terminal(chain.outcomes, chain.cu, len(chain.values))
    _, targets = decoupled_gae(rewards, chain.values, chain.cu, 0.9, 0.9)
    _, later = decoupled_gae(rewards, chain.values + 0.05, chain.cu, 0.9, 0.9)
    assert target_faults(targets, targets, 1e-3) == []
    assert target_faults(later, targets, 1e-3) == ["targets"]
