"""The experts that an engine chose stay with their tokens: from samples to batches, micro-batches
and other ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import spread, whole_of
from ranks import run_ranks

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import pack
from vapo_megatron.data.sample import Prompt, Sample

LENGTHS = [(2, 3), (1, 1), (4, 2)]  # prompt and response tokens


def make_samples(told: bool = True, dtype: torch.dtype = torch.uint8) -> list[Sample]:
    """Every row of experts holds the token that it is of, in all four places."""
    samples = []
    token = 10
    for group, (prompt, response) in enumerate(LENGTHS):
        ids = list(range(token, token + prompt + response))
        token += prompt + response
        rows = torch.tensor(ids[:-1], dtype=dtype)[:, None].repeat(1, 4)
        head = Prompt(str(group), "", "", tuple(ids[:prompt]))
        sample = Sample(
            head, group, 0, 0, ids[prompt:], [-1.0] * response, "stop", 0, 0, reward=1.0
        )
        sample.routed_experts = rows if told else None
        samples.append(sample)
    return samples


def make_batch(told: bool = True) -> ExperienceBatch:
    return from_samples(make_samples(told))


def last_column(batch: ExperienceBatch, samples: list[int]) -> list[int]:
    """What the rows of these samples should say: their tokens but the last."""
    bounds = batch.cu_seqlens.tolist()
    return [int(token) for s in samples for token in batch.tokens[bounds[s] : bounds[s + 1] - 1]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_rows_follow_the_tokens_in_their_dtype_without_copies(dtype: torch.dtype) -> None:
    samples = make_samples(dtype=dtype)
    batch = from_samples(samples)
    assert batch.routed_experts is not None and batch.routed_experts.dtype == dtype
    assert batch.routed_experts[:, -1].tolist() == last_column(batch, [0, 1, 2])
    assert all(sample.routed_experts is None for sample in samples)


def test_a_selected_batch_keeps_them() -> None:
    batch = make_batch()
    chosen = batch.select([2, 0])
    assert chosen.routed_experts is not None
    assert chosen.routed_experts[:, -1].tolist() == last_column(batch, [2, 0])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_micro_batch_has_the_experts_of_its_own_positions(cp_size: int) -> None:
    batch = make_batch()
    for rank in range(cp_size):
        packed = pack(batch, [1, 2, 0], 2 * cp_size, 8, cp_size, rank, 2)
        assert packed.experts is not None and packed.experts.shape == (len(packed.ids), 4)
        real = packed.ids > 0
        assert packed.experts[real, -1].tolist() == packed.ids[real].tolist()
        assert packed.experts[~real].unique(dim=0).tolist() == [[0, 1, 0, 1]], (
            "padding: two different ones a layer"
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_rank_without_samples_has_experts_for_its_padding(dtype: torch.dtype) -> None:
    """Fewer samples than ranks: collectives of a forward pass want tokens of every rank, each
    through two experts."""
    packed = pack(from_samples(make_samples(dtype=dtype)).select([]), [], 4, 8, 1, 0, 2)
    assert packed.experts is not None and packed.experts.dtype == dtype
    assert packed.experts.tolist() == [[0, 1, 0, 1]] * 8


def test_without_experts_nothing_is_carried() -> None:
    batch = make_batch(told=False)
    assert batch.routed_experts is None
    assert pack(batch, [0], 1, 1, 1, 0, 2).experts is None
    assert pack(make_batch(), [0], 1, 1, 1, 0).experts is None


def test_a_batch_with_experts_for_some_samples_alone_has_none() -> None:
    samples = make_samples()
    samples[1].routed_experts = None
    assert from_samples(samples).routed_experts is None


def received(told: bool) -> Any:
    """What ranks have of rank 0's batch, together."""
    return {
        name: tensor.numpy()
        for name, tensor in whole_of(spread(make_batch(told))).tensors().items()
    }


@pytest.mark.parametrize("told", [True, False])
def test_ranks_get_their_samples_with_them(told: bool) -> None:
    expected = make_batch(told).tensors()
    assert ("routed_experts" in expected) is told
    for found in run_ranks(2, received, told):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (
                np.array_equal(found[name], tensor.numpy())
                and found[name].dtype == tensor.numpy().dtype
            )
