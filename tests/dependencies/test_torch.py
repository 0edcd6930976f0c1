"""What torch.distributed does over gloo that one would not guess (docs/dependencies.md)."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_models import write_model
from ranks import run_ranks
from trainables import make_trainable

RANKS = 3
# In bfloat16 256 + 1 is 256, but 256 + (1 + 1) is 258.
PLACES = range(RANKS)


def value_of_rank(place: int) -> float:
    return 256.0 if dist.get_rank() == place else 1.0


def summed(dtype: torch.dtype) -> list[float]:
    """The sum that this rank gets, by the rank that holds 256."""
    sums = []
    for place in PLACES:
        values = torch.full((1,), value_of_rank(place), dtype=dtype)
        dist.all_reduce(values)
        sums.append(values.item())
    return sums


def test_a_sum_of_bfloat16_over_three_ranks_depends_on_order() -> None:
    by_rank = run_ranks(RANKS, summed, torch.bfloat16)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert set(by_rank[0]) == {256.0, 258.0}


def test_a_sum_of_float32_over_three_ranks_is_exact() -> None:
    assert run_ranks(RANKS, summed, torch.float32) == [[258.0] * RANKS] * RANKS


def gradient_sums(model_dir: Path, place: int) -> set[float]:
    """This rank's shard of the summed gradients of a bfloat16 model, divided by Megatron's own
    factor."""
    trainable = make_trainable(model_dir, "lm", dtype="bfloat16")
    sums = set()
    for chunk in trainable.wrapped:
        for buffer in chunk.buffers:
            buffer.grad_data.fill_(value_of_rank(place))
        for group in chunk.bucket_groups:
            group.finish_grad_sync()
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(RANKS)[dist.get_rank()]
                sums |= set((shard / buffer.gradient_scaling_factor).unique().tolist())
    return sums


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_a_bfloat16_model_are_summed_exactly(tmp_path: Path, place: int) -> None:
    model_dir = write_model(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    assert run_ranks(RANKS, gradient_sums, model_dir, place) == [{258.0}] * RANKS
