"""Dynamic sampling's choice, and mini-batches that hold every response once."""

import pytest
import torch

from vapo_megatron.algorithms.selection import (
    frac_zero_std_groups,
    informative_groups,
    loss_mask,
    minibatch_seed,
    positive_responses,
    split_minibatches,
)

GROUPS = torch.tensor([7, 3, 7, 3, 1, 1, 7, 3, 1, 0])


def test_groups_that_agree_teach_nothing() -> None:
    correct = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0, 1, 1]).bool()
    assert informative_groups(correct, GROUPS).tolist() == [g == 7 for g in GROUPS.tolist()]


def test_groups_of_equal_rewards_are_counted() -> None:
    """Groups 7 and 1 differ inside, 3 is all equal, 0 has one response; numbers 2, 4, 5, 6 are of
    no group."""
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 1.0, 0.3])
    assert frac_zero_std_groups(rewards, GROUPS) == 0.5
    assert frac_zero_std_groups(torch.ones(10), GROUPS) == 1


def test_positives_are_correct_and_never_truncated() -> None:
    correct = torch.tensor([True, False, True, False])
    truncated = torch.tensor([False, False, True, True])
    assert positive_responses(correct, truncated).tolist() == [True, False, False, False]


def test_orders_of_mini_batches_differ_by_step_model_and_epoch() -> None:
    seeds = [
        minibatch_seed(step, salt, epoch)
        for step in ("1/1", "1/2", "2/1")
        for salt in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds) and seeds[0] == minibatch_seed("1/1", 1, 0)


def test_loss_is_carried_by_what_every_choice_keeps() -> None:
    truncated = torch.tensor([False, True, False, True])
    first = torch.tensor([True, True, False, True])
    second = torch.tensor([True, True, True, False])
    assert loss_mask(truncated, False).tolist() == [True] * 4
    assert loss_mask(truncated, True).tolist() == [True, False, True, False]
    assert loss_mask(truncated, False, first, None, second).tolist() == [True, True, False, False]
    assert loss_mask(truncated, True, first, second).tolist() == [True, False, False, False]


@pytest.mark.parametrize("unit", ["samples", "groups"])
@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_every_response_is_in_one_minibatch(unit, size: int) -> None:
    batches = split_minibatches(GROUPS, size, unit, seed=0)
    assert torch.cat(batches).sort().values.tolist() == list(range(10))
    counts = [len(set(GROUPS[b].tolist())) if unit == "groups" else b.numel() for b in batches]
    assert all(count == size for count in counts[:-1]) and 0 < counts[-1] <= size


def test_groups_stay_whole() -> None:
    for batch in split_minibatches(GROUPS, 2, "groups", seed=3):
        inside = torch.isin(GROUPS, GROUPS[batch])
        assert batch.tolist() == inside.nonzero().squeeze(1).tolist()


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        return [b.tolist() for b in split_minibatches(torch.arange(64), 8, "samples", seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_empty_batch_has_no_minibatch() -> None:
    assert split_minibatches(GROUPS[:0], 4, "samples", 0) == []


def test_one_correct_or_one_incorrect_of_three_is_enough() -> None:
    correct = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 0]).bool()
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert informative_groups(correct, groups).tolist() == [True] * 6 + [False] * 3
