"""The experts that an engine chose stay with their tokens: from samples to batches, micro-batches and other ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from vapo_megatron.experience.batch import ExperienceBatch, concatenate, from_samples
from vapo_megatron.experience.microbatch import pack
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.training.broadcast import broadcast_batch

LENGTHS = [(2, 3), (1, 1), (4, 2)]  # prompt and response tokens


def make_batch(told: bool = True, largest: int = 7) -> ExperienceBatch:
    """Every row of experts holds the token that it is of, in all four places, and `largest` once."""
    samples, token = [], 10
    for group, (prompt, response) in enumerate(LENGTHS):
        ids = list(range(token, token + prompt + response))
        token += prompt + response
        rows = torch.tensor(ids[:-1], dtype=torch.int16)[:, None].repeat(1, 4)
        rows[0, 0] = largest
        head = Prompt(str(group), "", "", tuple(ids[:prompt]))
        sample = Sample(head, group, 0, 0, ids[prompt:], [-1.0] * response, "stop", 0, 0, reward=1.0)
        sample.routed_experts = rows if told else None
        samples.append(sample)
    return from_samples(samples)


def last_column(batch: ExperienceBatch, samples: list[int]) -> list[int]:
    """What the rows of these samples should say: their tokens but the last."""
    bounds = batch.cu_seqlens.tolist()
    return [int(token) for s in samples for token in batch.tokens[bounds[s] : bounds[s + 1] - 1]]


@pytest.mark.parametrize(("largest", "dtype"), [(7, torch.uint8), (255, torch.uint8), (300, torch.int16)])
def test_rows_follow_the_tokens_in_the_smallest_type(largest: int, dtype: torch.dtype) -> None:
    batch = make_batch(largest=largest)
    assert batch.routed_experts is not None and batch.routed_experts.dtype == dtype
    assert batch.routed_experts[:, -1].tolist() == last_column(batch, [0, 1, 2])
    assert batch.routed_experts[0, 0] == largest


def test_selected_and_joined_batches_keep_them() -> None:
    batch = make_batch()
    chosen = batch.select([2, 0])
    assert chosen.routed_experts is not None
    assert chosen.routed_experts[:, -1].tolist() == last_column(batch, [2, 0])
    joined = concatenate([batch, chosen])
    assert joined.routed_experts is not None
    assert joined.routed_experts[:, -1].tolist() == last_column(batch, [0, 1, 2, 2, 0])
    assert concatenate([batch, make_batch(told=False)]).routed_experts is None


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_micro_batch_has_the_experts_of_its_own_positions(cp_size: int) -> None:
    batch = make_batch()
    for rank in range(cp_size):
        packed = pack(batch, [2, 0], 2 * cp_size, 8, cp_size, rank)
        assert packed.experts is not None and packed.experts.shape == (len(packed.ids), 4)
        real = packed.ids > 0
        assert packed.experts[real, -1].tolist() == packed.ids[real].tolist()
        # What padding goes through are experts that some token went through.
        assert all(row in batch.routed_experts.tolist() for row in packed.experts[~real].tolist())  # type: ignore[union-attr]


def test_without_experts_nothing_is_carried() -> None:
    batch = make_batch(told=False)
    assert batch.routed_experts is None
    assert pack(batch, [0], 1, 1, 1, 0).experts is None


def received(told: bool) -> Any:
    batch = broadcast_batch(make_batch(told) if dist.get_rank() == 0 else None)
    return None if batch.routed_experts is None else batch.routed_experts.numpy()


def test_every_rank_gets_them() -> None:
    expected = make_batch().routed_experts
    assert expected is not None
    assert all(np.array_equal(rows, expected.numpy()) for rows in run_ranks(2, received, True))
    assert run_ranks(2, received, False) == [None, None]
