"""Faults planted into a sound critic of a chain whose values are known are named, and nothing else is."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.aggregation import token_weights
from vapo_megatron.algorithms.critic_faults import FAULTS, loss_counts, loss_faults, target_faults, value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, figures_of
from vapo_megatron.algorithms.gae import decoupled_gae
from vapo_megatron.algorithms.segments import place_terminal, to_tokens

GROUPS, SIZE, LENGTH = 64, 8, 12


class Chain:
    """Responses that walk between -1 and 1 by fair steps: the value of a state is the state itself."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.rand(GROUPS, generator=generator).mul(1.6).sub(0.8).repeat_interleave(SIZE)
        states = [start]
        for _ in range(LENGTH - 1):
            room = 1 - states[-1].abs()
            side = torch.randint(0, 2, start.shape, generator=generator) * 2 - 1
            states.append(states[-1] + 0.5 * room * side)
        last = states[-1]
        self.outcomes = torch.where(torch.rand(last.shape, generator=generator) < (last + 1) / 2, 1.0, -1.0)
        self.values = torch.stack(states, 1).flatten()
        self.cu = torch.arange(0, len(start) * LENGTH + 1, LENGTH)
        self.groups = torch.arange(GROUPS).repeat_interleave(SIZE)
        self.returns = to_tokens(self.outcomes, self.cu)

    def faults(self, values: Tensor, returns: Tensor | None = None) -> list[str]:
        figures = figures_of(values, self.returns if returns is None else returns, self.cu)
        return value_faults(Figures.read(figures), self.groups, torch.ones(len(self.groups), dtype=torch.bool))


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


@pytest.mark.parametrize(
    ("counts", "faults"),
    [((4, 2, 2, 1), []), ((5, 2, 2, 2), ["mask"]), ((9, 4, 9, 9), ["mask"]), ((9, 9, 5, 2), ["end"]), ((0,) * 4, [])],
)
def test_half_of_the_tokens_and_of_the_ends_is_enough(counts: tuple[int, ...], faults: list[str]) -> None:
    assert loss_faults(torch.tensor(counts)) == faults


def test_targets_that_were_made_after_an_update_are_named() -> None:
    chain = Chain()
    rewards = place_terminal(chain.outcomes, chain.cu, len(chain.values))
    _, targets = decoupled_gae(rewards, chain.values, chain.cu, 0.9, 0.9)
    _, later = decoupled_gae(rewards, chain.values + 0.05, chain.cu, 0.9, 0.9)
    assert target_faults(targets, targets) == [] and target_faults(later, targets) == ["targets"]
