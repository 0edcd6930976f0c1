"""What a sample says of itself, and the tables of several."""

from typing import Any

import pytest
import torch
from batches import make_batch

from vapo_megatron.data.sample import Prompt, Sample


def sample_of(ids: list[int], reason: str = "stop", **more: Any) -> Sample:
    return Sample(Prompt("0", "", "", (1,)), 0, 0, 0, ids, [-1.0] * len(ids), reason, 0, 0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "truncated", "goes_on"), [("stop", 0, 0), ("length", 1, 0), ("abort", 0, 1)]
)
def test_how_a_response_ended(reason: str, truncated: bool, goes_on: bool) -> None:
    sample = sample_of([2, 3], reason)
    assert (sample.truncated, sample.goes_on) == (truncated, goes_on)


@pytest.mark.parametrize(
    ("mask", "last"),
    [(None, [2, 3, 4, 5]), ([1, 0, 1, 1], [4, 5]), ([1, 1, 0, 1], [5]), ([0, 1, 1, 1], [3, 4, 5])],
)
def test_the_last_turn_is_what_follows_the_last_observation(
    mask: list[int] | None, last: list[int]
) -> None:
    sample = sample_of([2, 3, 4, 5], loss_mask=mask)
    assert sample.last_turn.tolist() == last
    assert sample.written.tolist() == (
        [True] * 4 if mask is None else [bool(kept) for kept in mask]
    )


@pytest.mark.parametrize(
    ("start", "new", "trained"), [(None, 3, False), (0, 3, False), (2, 1, False), (3, 0, True)]
)
def test_windows_leave_what_the_policy_was_not_trained_on(
    start: int | None, new: int, trained: bool
) -> None:
    sample = sample_of([2, 3, 4], window_start=start)
    assert (sample.new_tokens, sample.is_trained) == (new, trained)


def test_lengths_of_a_table_are_those_that_each_model_reads() -> None:
    table = make_batch().table()
    plain = table.prompt_lengths + table.response_lengths
    assert table.samples == len(plain) and torch.equal(table.lengths, plain)
    assert torch.equal(table.critic_lengths, plain) and torch.equal(
        table.new_lengths, table.response_lengths
    )
    table.observation_lengths = torch.arange(len(plain))
    table.window_starts = torch.ones_like(plain)
    assert torch.equal(table.lengths, plain + table.observation_lengths)
    assert torch.equal(table.new_lengths, table.response_lengths - 1)
    table.privileged_lengths = torch.full_like(plain, 5)
    assert torch.equal(table.critic_lengths, table.lengths + 5), "once where there is one segment"
    table.segments = torch.full_like(plain, 3)
    assert torch.equal(table.critic_lengths, table.lengths + 15) and torch.equal(
        table.rows("privileged"), plain * 0 + 5
    )
