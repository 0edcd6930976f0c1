"""Advantages by group, against numbers worked out by hand and against Python's statistics
module."""

import statistics

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import advantages as adv
from vapo_megatron.algorithms.baselines import (
    TRACKER_FADE,
    TRACKER_PRIOR,
    tracked_values,
    with_responses,
)
from vapo_megatron.algorithms.registry import ESTIMATORS, call_with
from vapo_megatron.algorithms.segments import to_tokens

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 3.0])
GROUPS = torch.tensor([9, 9, 4, 9, 4, 9, -1])
BY_GROUP = ESTIMATORS.names(groups=True, per_token=False)


def by_name(name: str, rewards: Tensor, groups: Tensor) -> Tensor:
    """What a registered estimator gives; a response's length follows from its reward."""
    outcomes = {"rewards": rewards, "group_ids": groups, "lengths": 10 + (7 * rewards).long()}
    result: Tensor = call_with(ESTIMATORS.formula(name), outcomes)
    return result


def members(group: int) -> list[float]:
    return REWARDS[group == GROUPS].tolist()


def per_response(value_of) -> Tensor:
    return torch.tensor(
        [value_of(float(r), members(int(g))) for r, g in zip(REWARDS, GROUPS, strict=True)]
    )


def test_grpo() -> None:
    def expected(r: float, group: list[float]) -> float:
        if len(group) == 1:
            return r / (1 + 1e-6)
        return (r - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)

    torch.testing.assert_close(adv.grpo(REWARDS, GROUPS), per_response(expected))


def test_grpo_worked_example() -> None:
    # One right of four: mean 1/4, unbiased std sqrt((9/16 + 3/16) / 3) = 1/2.
    got = adv.grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), eps=0.0)
    assert got.tolist() == [1.5, -0.5, -0.5, -0.5]


def test_grpo_of_differences_as_small_as_its_epsilon() -> None:
    got = adv.grpo(
        torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    )
    assert got.tolist() == pytest.approx([-1 / (2**0.5 + 1), 1 / (2**0.5 + 1)])


@pytest.mark.parametrize("function", [adv.dr_grpo, adv.group_baseline])
def test_group_mean_is_the_baseline(function) -> None:
    torch.testing.assert_close(
        function(REWARDS, GROUPS), per_response(lambda r, group: r - statistics.mean(group))
    )


def test_rloo() -> None:
    def expected(r: float, group: list[float]) -> float:
        others = list(group)
        others.remove(r)
        return r - statistics.mean(others) if others else r

    torch.testing.assert_close(adv.rloo(REWARDS, GROUPS), per_response(expected))


def test_who_is_alone_in_a_group_is_compared_with_the_batch() -> None:
    def expected(r: float, group: list[float]) -> float:
        others = list(group) if len(group) > 1 else REWARDS.tolist()
        others.remove(r)
        return r - statistics.mean(others)

    torch.testing.assert_close(adv.batch_baseline(REWARDS, GROUPS), per_response(expected))
    assert adv.batch_baseline(REWARDS.double(), GROUPS).dtype == torch.float64


def test_prompt_history_decays_and_starts_from_the_others_mean() -> None:
    sums = torch.tensor([0.0, 3.0, -1.0]).double()
    weights = torch.tensor([0.0, 4.0, 1.0]).double()
    prior = torch.tensor([0.5, 0.5, 0.25]).double()
    expected = [
        (s + TRACKER_PRIOR * p) / (w + TRACKER_PRIOR)
        for s, w, p in zip(sums, weights, prior, strict=True)
    ]
    assert tracked_values(sums, weights, prior).tolist() == expected and float(expected[0]) == 0.5
    after = with_responses(
        sums, weights, torch.tensor([2.0, -1.0, 0.0]).double(), torch.tensor([2, 1, 3]).double()
    )
    assert after[0].tolist() == [2.0, TRACKER_FADE * 3 - 1, -TRACKER_FADE]
    assert after[1].tolist() == [2.0, TRACKER_FADE * 4 + 1, TRACKER_FADE + 3]


def test_raft_takes_the_first_best_of_each_group() -> None:
    assert adv.raft(REWARDS, GROUPS).tolist() == [1, 0, 0, 0, 1, 0, 1]


def test_remax() -> None:
    assert adv.remax(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("name", ESTIMATORS.names(groups=True, selects=False, per_token=False))
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    got = by_name(name, torch.full((7,), reward), torch.tensor([0, 0, 0, 1, 1, 0, 0]))
    assert not got.any()


@pytest.mark.parametrize("name", BY_GROUP)
def test_permuting_and_splitting_samples_changes_nothing(name: str) -> None:
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(24) % 6
    whole = by_name(name, rewards, groups)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(by_name(name, rewards[order], groups[order]), whole[order])
    for part in (groups < 2, groups >= 2):
        torch.testing.assert_close(by_name(name, rewards[part], groups[part]), whole[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BY_GROUP)
def test_advantages_have_the_type_of_the_rewards(name: str, dtype: torch.dtype) -> None:
    assert by_name(name, REWARDS.to(dtype), GROUPS).dtype == dtype


@pytest.mark.parametrize("name", BY_GROUP)
def test_shapes_that_differ_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        by_name(name, torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_a_teacher_adds_its_reverse_kl_to_each_token() -> None:
    torch.manual_seed(0)
    advantages, student, teacher = torch.randn(3, 50)
    expected = [
        float(a) - 0.7 * (float(s) - float(t))
        for a, s, t in zip(advantages, student, teacher, strict=True)
    ]
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        adv.distilled(advantages, student, teacher, 0.7).double(), wanted, rtol=1e-5, atol=1e-6
    )


def test_to_tokens() -> None:
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert to_tokens(torch.tensor([1.0, 2.0, 3.0]), cu_seqlens).tolist() == [1, 1, 3, 3, 3]


def test_reinforce_pp() -> None:
    # Two responses, beta 1/2: A_t = R - (KL_t + KL_{t+1} + ...) / 2.
    kl = torch.tensor([2.0, 4.0, 6.0, 1.0])
    got = adv.reinforce_pp(torch.tensor([10.0, -1.0]), 0.5 * kl, torch.tensor([0, 3, 4]))
    assert got.tolist() == [4.0, 5.0, 7.0, -1.5]


def test_returns_to_go_discounts() -> None:
    got = adv.reinforce_pp(
        torch.zeros(2), -torch.tensor([1.0, 2.0, 4.0, 1.0]), torch.tensor([0, 3, 4]), gamma=0.5
    )
    assert got.tolist() == [3.0, 4.0, 4.0, 1.0]


@pytest.mark.parametrize(("tokens", "spread"), [(1000, 3), (1000, 0.1), (3, 1)])
def test_whiten(tokens: int, spread: float) -> None:
    x = torch.randn(tokens, generator=torch.Generator().manual_seed(0)) * spread + 5 * spread
    mask = torch.arange(tokens) % 4 != 0
    assert adv.whiten(x.bfloat16(), mask).dtype == torch.bfloat16
    kept = x[mask].tolist()
    white = adv.whiten(x, mask)
    assert not white[~mask].any()
    assert abs(float(white[mask].mean())) < 1e-6
    assert statistics.stdev(white[mask].tolist()) == pytest.approx(1, abs=1e-5)
    mean = statistics.mean(kept)
    std = statistics.stdev(kept)
    torch.testing.assert_close(white[mask], (x[mask] - mean) / std, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        adv.whiten(x, mask, shift_mean=False)[mask], (x[mask] - mean) / std + mean
    )


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_whiten_of_nothing_to_compare_is_finite(kept: int) -> None:
    mask = torch.arange(3) < kept
    assert not adv.whiten(torch.full((3,), 0.7), mask).any()


def test_reinforce_pp_discounts_the_reward_and_the_penalty() -> None:
    found = adv.reinforce_pp(
        torch.tensor([1.0]), torch.tensor([0.0, 0.5]), torch.tensor([0, 2]), 0.5
    )
    assert found.tolist() == [0.25, 0.5]
