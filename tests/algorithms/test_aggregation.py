"""Weights with global denominators: they are the means they stand for, and a split batch adds up to
the whole."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.aggregation import nll_weights, token_weights
from vapo_megatron.algorithms.segments import (
    last_tokens,
    place_terminal,
    response_lengths,
    segment_mean,
    to_tokens,
    tokens_from,
)

LENGTHS = torch.tensor([4, 1, 0, 3])
CU = torch.tensor([0, 4, 5, 5, 8])
LOSSES = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, -1.0, -2.0, -3.0])


def total(weights: Tensor, losses: Tensor = LOSSES) -> float:
    return float((to_tokens(weights, CU) * losses).sum())


def test_token_mean() -> None:
    assert total(token_weights(LENGTHS, "token_mean")) == pytest.approx(14 / 8)


def test_sequence_mean_counts_responses_that_have_tokens() -> None:
    assert total(token_weights(LENGTHS, "sequence_mean")) == pytest.approx((2.5 + 10 - 2) / 3)


def test_constant() -> None:
    assert total(token_weights(LENGTHS, "constant", constant=5)) == pytest.approx(14 / 3 / 5)


def test_selection_leaves_numerator_and_denominator() -> None:
    selected = torch.tensor([True, False, True, True])
    assert total(token_weights(LENGTHS, "token_mean", selected=selected)) == pytest.approx(4 / 7)
    assert total(token_weights(LENGTHS, "sequence_mean", selected=selected)) == pytest.approx(
        (2.5 - 2) / 2
    )
    assert total(
        token_weights(LENGTHS, "constant", constant=2, selected=selected)
    ) == pytest.approx(4 / 2 / 2)


@pytest.mark.parametrize(
    ("mode", "constant"), [("token_mean", None), ("sequence_mean", None), ("constant", 0.5)]
)
def test_one_response_of_one_token_is_the_whole_loss(mode, constant) -> None:
    weights = token_weights(torch.tensor([1, 5]), mode, constant, torch.tensor([True, False]))
    assert weights.tolist() == [1 / (constant or 1), 0]


def test_masked_tokens_leave_the_lengths() -> None:
    mask = torch.tensor([1, 0, 0, 1, 0, 1, 1, 1])
    lengths = response_lengths(CU, mask)
    assert lengths.tolist() == [2, 0, 0, 3]
    assert total(token_weights(lengths, "token_mean"), LOSSES * mask) == pytest.approx((5 - 6) / 5)
    assert total(token_weights(lengths, "sequence_mean"), LOSSES * mask) == pytest.approx(
        (2.5 - 2) / 2
    )
    assert segment_mean(LOSSES, CU).tolist() == pytest.approx([2.5, 10, 0, -2])


def test_nll_weights() -> None:
    assert total(nll_weights(LENGTHS, torch.tensor([1, 0, 0, 1]))) == pytest.approx(4 / 7)
    assert not nll_weights(LENGTHS, torch.zeros(4)).any()


@pytest.mark.parametrize(
    ("mode", "constant"), [("token_mean", None), ("sequence_mean", None), ("constant", 7.0)]
)
def test_microbatches_add_up_to_the_whole(mode, constant) -> None:
    weights = token_weights(LENGTHS, mode, constant)
    per_response = torch.stack([part.sum() for part in LOSSES.split(LENGTHS.tolist())])
    for parts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]):
        assert sum(float((weights[p] * per_response[p]).sum()) for p in parts) == pytest.approx(
            total(weights)
        )
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(token_weights(LENGTHS[order], mode, constant), weights[order])


def test_an_empty_minibatch_weighs_nothing() -> None:
    for mode in ("token_mean", "sequence_mean"):
        assert token_weights(torch.zeros(3, dtype=torch.int64), mode).tolist() == [0, 0, 0]


def test_tokens_from_a_place_in_their_response_on() -> None:
    found = tokens_from(torch.tensor([3, 0, 0, 3]), CU)
    assert found.tolist() == [False] * 3 + [True, True] + [False] * 3 and found.dtype == torch.bool
    assert tokens_from(torch.zeros(4, dtype=torch.int64), CU.int()).all()


def test_the_terminal_reward_sits_on_the_last_token_that_counts() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert place_terminal(rewards, CU, 8).tolist() == [0, 0, 0, 1, 2, 0, 0, 4]
    assert [part.tolist() for part in last_tokens(CU)] == [[0, 1, 3], [3, 4, 7]]


def test_turn_rewards_leave_the_terminal_one_and_keep_its_dtype() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    earlier = torch.zeros(8)
    earlier[1], earlier[5] = 0.25, 1.5
    placed = place_terminal(rewards, CU, 8, earlier)
    assert placed.tolist() == [0, 0.25, 0, 0.75, 2, 1.5, 0, 2.5] and placed.dtype == rewards.dtype
    assert earlier.count_nonzero() == 2, "left as it was given"
